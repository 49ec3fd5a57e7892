// BspUpdates: what was pushed to a shard under BSP and waits for its update.
//
// Update c is made when everybody has closed c (sync/gate.h), from what each contributed: first what one worker pushed,
// in the order of its sequences, then the workers in the order of their ranks. So it is the same numbers in the same
// order whoever comes first:
//
//     rank 0   w * g
//     rank 1   w * g  +  w' * g'   (two pushes)          ((rank 0 + rank 1) + rank 2) / all weights   ->   rule
//     rank 2   w * g
//
// Optimizers take the mean, Sum adds, Max and Min take the largest and the smallest, Assign the highest rank's.
//
// A push that lies in its worker's arena stays there. What came over a socket is added to a running sum as soon as all
// lower ranks have closed the iteration; until then it waits in memory that is limited.
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

// Whose shard it is.
struct Target {
  Tensor* tensor = nullptr;  // one of the two
  Table* table = nullptr;
  uint32_t shard = 0;
};

class BspUpdates final : public Staged {
 public:
  struct Push {
    uint32_t rank = 0;
    uint64_t incarnation = 0;  // of the worker, if known: what a lost one has not closed ends when another takes over
    uint64_t iteration = 0;
    double weight = 1;
    Hyper hyper;
    Dtype dtype = Dtype::kFloat32;
    std::vector<Span> spans;   // of a tensor; `at` counts from `numbers`
    std::vector<Keyed> keyed;  // of a table, likewise in rows
    const std::byte* numbers = nullptr;
    uint64_t bytes = 0;                  // of the numbers, where they have to be copied to stay
    std::shared_ptr<const void> memory;  // what keeps the numbers; null: they are good while the turn is held
    bool charged = false;                // the memory is limited
    bool summed = false;                 // it is the running sum of all workers up to this rank, and weighed

    uint64_t items() const {  // elements, or rows
      uint64_t n = keyed.size();
      for (const Span& s : spans) n += s.n;
      return n;
    }
    // Its own copy of the numbers, one behind the other, `item_bytes` each; they count against the quota until it is
    // gone, which has been charged.
    void copy_numbers(uint64_t item_bytes, uint64_t all_bytes, StagingQuota* quota);
  };

  // False when it is not counted: it comes too late, or repeats what a worker that was lost has closed here.
  bool add(Push push, const Gate& gate);
  // Whether all lower ranks have closed the iteration, and the one before it is made: what this worker pushes goes into
  // the running sum as soon as it closes, too.
  static bool is_next(uint32_t rank, uint64_t iteration, const Gate& gate);
  // Adds to the running sum what can be, so that memory that is limited, or good for this turn only, is used no more.
  void fold(const Gate& gate, const Target& target);
  // Everything as bytes, for a shard that moves: whole pushes, but rows of a table in pieces of at most so many bytes.
  std::vector<std::string> copy(const Gate& gate, const Target& target, size_t bytes_max) const;
  // One of them, at the shard's new place; its memory counts against the quota.
  Status put(const std::byte* body, size_t bytes, const Gate& gate, const Target& target, StagingQuota* quota);

  // Makes the next update. If there is no memory for its rows it changes nothing: error() says so for a while. `last`:
  // none follows, and who waits for it may be served.
  void make(const Gate& gate, const Target& target, Shard& shard, bool last, Waiting* own);
  Status error(uint64_t iteration) const;
  const std::vector<Push>& waiting() const { return pushes_; }  // what is not in the running sum
  // The first iteration there is anything for; Gate::kNone when there is none.
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
    uint32_t last = 0;  // the highest rank in it
    double weight = 0;  // of the pushes in it
    Hyper hyper;        // of the lowest rank
    std::vector<std::byte> numbers;
    std::vector<uint8_t> covered;  // empty: everything
    RowSum rows;
  };

  bool make_at_once(size_t end, const Gate& gate, const Target& target, const std::vector<Waiting*>& waiting);
  void insert(Push push);
  void add_worker(size_t begin, size_t end, const Target& target);
  template <class T>
  void add_dense(size_t begin, size_t end, const Target& target);
  void add_rows(size_t begin, size_t end, const Target& target);
  std::vector<Span> covered_spans(const Target& target) const;
  Status apply(const Target& target, double weight);

  std::vector<Push> pushes_;  // by iteration, rank, and order of arrival
  Sum sum_;                   // of the next update
  std::vector<std::pair<uint64_t, Status>> errors_;
};

// With the turn: makes every update that is complete. `own`: somebody who has not been parked.
void make_updates(Shard& shard, const Target& target, Waiting* own = nullptr);

// With the turn: a worker inside this process has closed everything before `clock`. Whoever waited for that goes on.
void close_in_turn(const Target& target, Shard& shard, uint32_t rank, uint64_t clock, double weight);

}  // namespace windlass
