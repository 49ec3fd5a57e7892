// Every limit of the core, in one place. Units are last in the names.
#pragma once

#include <cstddef>
#include <cstdint>

namespace windlass::limits {

inline constexpr size_t kCacheLineBytes = 64;
inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// Objects.
inline constexpr size_t kNameBytesMax = 256;
inline constexpr size_t kObjectsMax = 1u << 16;
inline constexpr size_t kTensorDimsMax = 8;
inline constexpr uint64_t kTensorElementsMax = uint64_t{1} << 40;
inline constexpr uint32_t kTableDimMax = 1u << 20;
inline constexpr uint32_t kTableShards = 256;
inline constexpr uint32_t kShardRowsMax = 0xFFFFFFF0u;
inline constexpr uint64_t kRequestKeysMax = uint64_t{1} << 31;

// How a tensor is cut: into shards of bytes / kTensorPieces, clamped to these two.
inline constexpr uint64_t kTensorPieces = 64;
inline constexpr uint64_t kShardBytesMin = uint64_t{64} << 10;
inline constexpr uint64_t kShardBytesMax = uint64_t{4} << 20;

// Rules.
inline constexpr int kRuleVectorsMax = 3;     // per-element state arrays
inline constexpr int kForeignVectorsMax = 8;  // the same for a user's rule
inline constexpr int kForeignRowScalarsMax = 16;
inline constexpr uint32_t kForeignShardScalarsMax = 1u << 24;
inline constexpr size_t kForeignNameBytesMax = 4096;
inline constexpr size_t kRuleTextBytesMax = 2048;                  // as its maker's client writes it down
inline constexpr uint32_t kCallBytesMax = 1u << 20;                // a function's name and arguments
inline constexpr size_t kCallRowsBytes = size_t{16} << 20;         // table rows passed to one call
inline constexpr size_t kResultBytesMax = size_t{16} << 20;        // what one call returns
inline constexpr uint64_t kResultsBytesMax = uint64_t{256} << 20;  // all calls of a request together
inline constexpr uint64_t kWholeBytesMax = uint64_t{256} << 20;    // a tensor that is one shard
inline constexpr int kRuleHyperMax = 8;                            // numbers that travel with a push
inline constexpr size_t kPushNumbersMax = kRuleHyperMax + 3;       // plus the three weights of a push under BSP

// Work.
inline constexpr size_t kCrewBytesMin = size_t{2} << 20;         // below this the caller works alone
inline constexpr size_t kAsyncBytesMin = size_t{1} << 20;        // below this an async call is done at once
inline constexpr size_t kGilBytesMax = size_t{32} << 10;         // below this a call keeps the GIL
inline constexpr size_t kStreamBytesMin = size_t{1} << 20;       // from here on outputs bypass the cache
inline constexpr size_t kStreamPullBytesMin = size_t{24} << 20;  // the same for pulls, which only copy
inline constexpr size_t kStreamPartBytesMin = size_t{64} << 10;  // for each object: bypassing costs a wait at the end
inline constexpr uint64_t kKeptBytesMax = uint64_t{64} << 20;    // copies for asynchronous pushes of ordinary arrays
inline constexpr int64_t kNoDeadline = INT64_MAX;
inline constexpr int64_t kSpinNs = 20'000;      // how long a waiter spins before it blocks
inline constexpr int64_t kSpinNsPerPart = 200;  // added for each part of a request
inline constexpr int64_t kSpinNsMax = 60'000;
inline constexpr int64_t kHotNs = 100'000;  // if the last answer came within this, a waiter spins for the next
inline constexpr uint32_t kSessionsMax = 1u << 20;
inline constexpr uint64_t kPutBytes = uint64_t{32} << 20;   // of one request: a larger put is cut into several
inline constexpr uint64_t kUpdatesMax = uint64_t{1} << 62;  // of a shard, as a put may set them

// Queries.
inline constexpr size_t kQueryBytesMax = size_t{64} << 10;  // of the question
inline constexpr size_t kProgramOpsMax = 256;               // of an expression
inline constexpr size_t kProgramDepthMax = 16;              // of its stack
inline constexpr uint64_t kTopMax = 1'000'000;              // rows of a top_k
inline constexpr uint64_t kBinsMax = 4096;                  // of a histogram
inline constexpr size_t kScanRowsMax = size_t{64} << 10;    // rows that a filtered scan looks at in one turn
inline constexpr size_t kWalkKeptBytes = size_t{4} << 20;   // of keys that a thread keeps between shards

// The wire. Lengths are checked against these before memory is taken for them.
inline constexpr size_t kSectionBytes = 64;  // the size of headers; everything is padded to it
inline constexpr uint64_t kFrameBytesMax = uint64_t{1} << 42;
inline constexpr uint32_t kBlocksMax = 1u << 20;
inline constexpr uint32_t kBlockEntriesMax = 4096;
inline constexpr uint64_t kBlockBytesMax = uint64_t{64} << 10;  // of numbers, where a block has several entries
inline constexpr uint32_t kItemsBytesMax = 1u << 28;
inline constexpr uint64_t kNumbersBytesMax = uint64_t{1} << 30;
inline constexpr uint32_t kBodyBytesMax = 1u << 20;  // of an operation that is about no shard
inline constexpr size_t kMessageBytesMax = 4096;     // of an error
inline constexpr uint32_t kServersMax = 4096;
inline constexpr size_t kAddressBytesMax = 512;
inline constexpr size_t kAskedMax = 4096;  // requests that one ask names

// Connections.
inline constexpr size_t kLanes = 2;                                // per worker and server: small requests, bulk
inline constexpr size_t kBulkBytesMin = size_t{64} << 10;          // from here on a request is bulk
inline constexpr uint32_t kConnectionsMax = 8192;                  // of a server
inline constexpr size_t kClientsMax = 4096;                        // sessions that a server remembers, connected or not
inline constexpr size_t kGivenUpMax = 4096;                        // given-up workers of an app that are remembered
inline constexpr uint32_t kWindowMax = 128;                        // requests without an answer, per server
inline constexpr size_t kParkedMax = 1024;                         // the same in number, per shard
inline constexpr size_t kPatientMax = size_t{1} << 14;             // pushes that wait for their update, per server
inline constexpr uint64_t kRoundsBytesMax = uint64_t{256} << 20;   // their payload, inside the process
inline constexpr uint64_t kStagingBytesMax = uint64_t{512} << 20;  // all that is under way, of a server process:
inline constexpr uint64_t kStagedShare = 2;                        // half for pushes that wait for their update,
inline constexpr uint64_t kReceivedShare = 4;                      // a quarter for large blocks being received,
inline constexpr uint64_t kWaitingShare = 8;                       // an eighth for requests that wait,
inline constexpr uint64_t kAnswersShare = 8;                       // an eighth for answers that are not sent yet
inline constexpr size_t kKeptAnswersMax = 2 * kWindowMax;          // that cannot be made again, per session and shard
inline constexpr uint64_t kHugePartBytes = uint64_t{64} << 20;     // larger blocks are received one at a time
inline constexpr int kStagedStallMs = 2'000;  // a peer that stalls within a large block, which holds memory, is dropped
inline constexpr int kStallMs = 30'000;       // a peer that stalls within a frame is dropped
inline constexpr int kAskMs = 50;             // a client without an answer for this long asks
inline constexpr int kAskMsMax = 2'000;       // then ever less often, up to this interval
inline constexpr size_t kReadAheadBytes = 16 << 10;
inline constexpr size_t kDirectBytesMin = 8 << 10;         // from here on bytes are received in place
inline constexpr size_t kChunkBytes = size_t{256} << 10;   // gathered for one system call
inline constexpr size_t kSendBytes = size_t{1} << 20;      // sent in place by one system call: TCP likes it large
inline constexpr size_t kTogetherBytes = 8 << 10;          // queued small requests leave together, up to this
inline constexpr size_t kAnswerBytes = size_t{256} << 10;  // small answers are gathered up to this

// Checkpoints.
inline constexpr uint64_t kCaptureBytesMax = uint64_t{256} << 20;   // set aside for one by writers, of a server
inline constexpr uint64_t kCaptureSpareBytes = uint64_t{24} << 20;  // kept of what was written, for what comes next

// Shards that move.
inline constexpr size_t kShardChunkBytes = size_t{256} << 10;    // rows are copied about this much at a time
inline constexpr size_t kShardChunkBytesMax = size_t{16} << 20;  // larger chunks are refused
inline constexpr size_t kShardRecordsMax = size_t{1} << 16;      // session records that move with a shard
inline constexpr size_t kShardRoundsMax = 8;                     // passes over changed rows before it is frozen
inline constexpr size_t kShardLeftRows = 512;                    // it is frozen early when this few are left

// With a server on the same host, requests from this size on use arenas; below it, sending costs no more.
inline constexpr size_t kArenaBytesMin = size_t{1} << 10;
inline constexpr size_t kArenasMax = 4096;  // of a session
// The arena keeps this much freed memory for the next allocation.
inline constexpr size_t kArenaCacheBytesMax = size_t{1} << 30;

}  // namespace windlass::limits
