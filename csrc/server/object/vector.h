// Vector operations on a server: y.axpy(a, x) and its siblings, shard by shard (docs/formats/wire.md, operation 23).
//
// Shard i of y and shard i of x are two shards, and each is worked on by whoever has its turn. Nobody ever holds two
// turns: two operations that hold each other's would wait for ever. So the numbers of x are copied at x's turn, and
// y is changed at y's own, a little later:
//
//     x's turn:   here? pushes of this session seen?   copy x      (at most 4 MiB, the thread's own memory)
//     y's turn:   y's sequence, then y += a * copy                 (or parked with the copy, if it came too early)
//
// Where x is y there is one turn and no copy. What the caller pushed to x before is in the copy; what others push
// meanwhile may be or not.
//
// x may not be here: while two tensors that are alike move, one of them arrives first. Then nothing is done, a write
// uses its sequence up all the same, and the answer says so (flag kApart) and where x is. The client tries again, with
// another sequence.
#pragma once

#include "base/buffer.h"
#include "server/object/served_object.h"

namespace windlass {

// For an entry that is a vector operation on `object`, whose step is decoded: the numbers of the other tensor's shard
// become the entry's own, in `memory`. other: nullptr where it is not on this server. kStaleMap: the other shard is not
// here, or not as far as the entry wants it.
Status read_other(const Batch& batch, ServedObject& object, ServedObject* other, Entry* entry, VectorStep* step,
                  Buffer* memory);

}  // namespace windlass
