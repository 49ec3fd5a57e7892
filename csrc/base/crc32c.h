// CRC32C (Castagnoli): the checksum of frames and files.
//
// The value does not depend on the machine; the instructions that compute it do, and are chosen once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace windlass {

// The checksum of `bytes` more bytes after those whose checksum is `so_far` (0 for none).
uint32_t crc32c(const void* data, size_t bytes, uint32_t so_far = 0);

// What crc32c() chooses from, for tests and measurements.
namespace crc {

using Crc32c = uint32_t (*)(const void* data, size_t bytes, uint32_t so_far);

struct Implementation {
  const char* name;
  Crc32c run;
};

std::vector<Implementation> implementations();  // those this machine can run: the portable one first, the best last

}  // namespace crc
}  // namespace windlass
