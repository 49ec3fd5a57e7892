"""Both ends of a control connection prove that they know the token, and show it to nobody.

    scheduler -> member   challenge   32 random bytes
    member -> scheduler   answer      32 random bytes, proof over both
    scheduler -> member   confirm     proof over both, in other words; or nothing at all, which is a refusal

The words differ from those of the data plane (windlass/_net/handshake.py), so no proof serves twice. Over HTTP a Bearer
value that is made from the token does the same for tools that read the status.
"""

import hmac
import secrets

from windlass._net.token import key_of

NONCE_BYTES, PROOF_BYTES = 32, 32
REFUSAL = b""  # instead of a confirmation; it proves nothing
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
_MEMBER, _SCHEDULER, _API = b"windlass member\0", b"windlass scheduler\0", b"windlass api\0"


def make_challenge() -> bytes:
    """The scheduler's first message."""
    return secrets.token_bytes(NONCE_BYTES)


def make_answer(token: bytes, challenge: bytes) -> bytes:
    """The member's proof."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + _proof(token, _MEMBER, challenge, nonce)


def check_answer(token: bytes, challenge: bytes, answer: bytes) -> bool:
    """Whether the member knows the token."""
    nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    return len(answer) == ANSWER_BYTES and hmac.compare_digest(proof, _proof(token, _MEMBER, challenge, nonce))


def make_confirm(token: bytes, challenge: bytes, answer: bytes) -> bytes:
    """The scheduler's proof."""
    return _proof(token, _SCHEDULER, challenge, answer)


def check_confirm(token: bytes, challenge: bytes, answer: bytes, confirm: bytes) -> bool:
    """Whether the scheduler knows the token."""
    return hmac.compare_digest(confirm, make_confirm(token, challenge, answer))


def bearer(token: bytes) -> str:
    """What ``Authorization: Bearer`` says."""
    return hmac.digest(key_of(token), _API, "sha256").hex()


def check_bearer(token: bytes, header: str) -> bool:
    """Whether a header has the right value."""
    return hmac.compare_digest(header.encode(errors="replace"), f"Bearer {bearer(token)}".encode())


def _proof(token: bytes, words: bytes, *messages: bytes) -> bytes:
    return hmac.digest(key_of(token), words + b"".join(messages), "sha256")
