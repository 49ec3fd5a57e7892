// BspUpdates: the pushes to a shard under BSP that wait for their update.
//
// Update c is made when everybody has closed c (sync/gate.h). It first adds up each worker's pushes in the order of
// their sequences, then the workers in the order of their ranks. So the numbers and their order do not depend on who
// comes first:
//
//     rank 0   w * g
//     rank 1   w * g  +  w' * g'   (two pushes)          ((rank 0 + rank 1) + rank 2) / all weights   ->   rule
//     rank 2   w * g
//
// Optimizers take the mean, Sum adds, Max and Min take the largest and the smallest, Assign the highest rank's.
//
// A push that lies in its worker's arena stays there. A push that came over a socket is added to a running sum as soon
// as all lower ranks have closed the iteration; until then it waits in memory that the staging quota limits. So is the
// sum's: a shard has one at most. Where there is no room for it, pushes stay where they are until their update.
//
// Thread safety: the holder of the shard's turn.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/object/staging_quota.h"
#include "session/shard.h"
#include "table/table.h"
#include "tensor/tensor.h"

namespace windlass {

// A shard and its object.
struct Target {
  Tensor* tensor = nullptr;  // one of the two
  Table* table = nullptr;
  uint32_t shard = 0;
};

class BspUpdates final : public Staged {
 public:
  struct Push {
    uint32_t rank = 0;
    uint64_t incarnation = 0;  // of the worker, if known: a replacement drops what a lost worker has not closed
    uint64_t iteration = 0;
    double weight = 1;
    Hyper hyper;
    Dtype dtype = Dtype::kFloat32;
    std::vector<Span> spans;   // of a tensor; `at` counts from `numbers`
    std::vector<Keyed> keyed;  // of a table, likewise in rows
    const std::byte* numbers = nullptr;
    uint64_t bytes = 0;                  // of the numbers, if they must be copied
    std::shared_ptr<const void> memory;  // keeps the numbers alive; null: valid while the turn is held
    bool charged = false;                // it is a copy, which holds limited memory
    bool lent = false;                   // they are, or were copied from, memory that its worker may change at any time
    bool summed = false;                 // it is the running sum, weighed, of all workers up to this rank

    uint64_t items() const {  // elements, or rows
      uint64_t n = keyed.size();
      for (const Span& s : spans) n += s.n;
      return n;
    }
    // Makes its own copy of the numbers, back to back, `item_bytes` each, which keeps the room that was taken for it.
    void copy_numbers(uint64_t item_bytes, uint64_t all_bytes, StagingQuota::Room room = {});
  };

  // quota: of the running sum; nullptr: nothing is counted.
  explicit BspUpdates(StagingQuota* quota = nullptr) : quota_(quota) {}

  // For a push that goes into the running sum in the same turn: takes room for what that adds. False if there is none.
  bool make_room(const Push& push, const Gate& gate, const Target& target);
  // False if the push is dropped: it is too late, or repeats what a lost worker has closed here.
  bool add(Push push, const Gate& gate);
  // Whoever pushes or closes has the rank: drops what another incarnation pushed under it and has not closed.
  void drop_lost(uint32_t rank, uint64_t incarnation, const Gate& gate);
  // Whether all lower ranks have closed the iteration and all updates before it are made: this worker's pushes go into
  // the running sum as soon as it closes, too.
  static bool is_next(uint32_t rank, uint64_t iteration, const Gate& gate);
  // Adds what it can to the running sum, to free memory that is limited or valid for this turn only; unless the next
  // update is complete and can be made in this turn.
  void fold(const Gate& gate, const Target& target);
  // Everything as bytes, for a shard that moves: whole pushes, but a table's rows in pieces of at most `bytes_max`.
  std::vector<std::string> copy(const Gate& gate, const Target& target, size_t bytes_max) const;
  // One of them, at the shard's new place.
  Status put(const std::byte* body, size_t bytes, const Gate& gate, const Target& target);

  // Makes the next update. Without memory for its rows it changes nothing, and error() reports that for a while.
  // `last`: no other update follows, so it may write the outputs of those that wait for it, `own` among them.
  void make(const Gate& gate, const Target& target, Shard& shard, bool last, Waiting* own);
  Status error(uint64_t iteration, uint32_t rank) const;
  const std::vector<Push>& waiting() const { return pushes_; }  // not in the running sum yet
  // The first iteration with pushes; Gate::kNone if there is none.
  uint64_t first(const Gate& gate) const;

 private:
  // A row per key.
  struct RowSum {
    std::vector<Keyed> keyed;  // each once; `at` counts rows
    std::vector<float> rows;
    std::vector<uint32_t> table;  // of places in `keyed`, plus one

    float* find(uint64_t hash, size_t dim, bool* fresh);
    void grow();
    void clear();
  };
  struct Sum {
    bool any = false;
    uint32_t last = 0;   // the highest rank in it
    double weight = 0;   // of the pushes in it
    double dropped = 0;  // of those that their workers counted and that were dropped
    Hyper hyper;         // of the lowest rank
    std::vector<std::byte> numbers;
    std::vector<uint8_t> covered;  // empty: everything
    RowSum rows;
    std::shared_ptr<StagingQuota::Room> room;  // for it
  };

  // Copies lent numbers of the first *end pushes that must be finite, and drops those that are not any more.
  void secure(size_t* end, const Target& target);
  bool make_at_once(size_t end, const Gate& gate, const Target& target, const std::vector<Waiting*>& waiting);
  bool make_of_rows(size_t end, const Gate& gate, const Target& target, Status* status);
  void insert(Push push);
  uint64_t sum_bytes(const Target& target, uint64_t more_items) const;
  bool make_room(uint64_t bytes);
  void add_worker(size_t begin, size_t end, const Target& target);
  template <class T>
  void add_dense(size_t begin, size_t end, const Target& target);
  void add_rows(size_t begin, size_t end, const Target& target);
  std::vector<Span> covered_spans(const Target& target) const;
  Status apply(const Target& target, double weight);

  StagingQuota* quota_;
  std::vector<Push> pushes_;  // by iteration, rank, and order of arrival
  Sum sum_;                   // of the next update
  struct Failure {
    uint64_t iteration;
    uint32_t rank;  // whose push it was; Gate::kOutsider: everybody's
    Status status;
  };
  void note(Failure failure);
  std::vector<Failure> errors_;
};

// With the turn: makes every update that is complete. `own`: the entry at hand, which is not parked.
void make_updates(Shard& shard, const Target& target, Waiting* own = nullptr);

}  // namespace windlass
