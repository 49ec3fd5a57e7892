// Vector operations on a server: y.axpy(a, x) and its siblings, shard by shard (docs/formats/wire.md, operation 23).
//
// Shard i of y and shard i of x have a turn each. Nobody ever holds two turns, or two operations could deadlock. So the
// numbers of x are copied at x's turn, and y is changed at its own turn, a little later:
//
//     x's turn:   here? pushes of this session seen?   copy x      (at most 4 MiB, the thread's own memory)
//     y's turn:   y's sequence, then y += a * copy                 (or parked with the copy, if it came too early)
//
// If x is y there is one turn and no copy. The copy includes what the caller has pushed to x before; it may or may not
// include what others push meanwhile.
//
// x may not be here: while two tensors that are alike move, one of them arrives first. Then nothing is changed, though
// a write uses up its sequence; the answer has the flag kApart and says where x is. The client tries again, with
// another sequence.
#pragma once

#include "base/buffer.h"
#include "server/object/served_object.h"

namespace windlass {

// For an entry that is a vector operation on `object`, whose step is decoded: copies the numbers of the other tensor's
// shard into `memory`, as the entry's input. other: nullptr if it is not on this server. kStaleMap: the other shard is
// not here, or has not got as far as the entry wants.
Status read_other(const Batch& batch, ServedObject& object, ServedObject* other, Entry* entry, VectorStep* step,
                  Buffer* memory);

}  // namespace windlass
