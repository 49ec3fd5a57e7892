// What the core asks of the operating system. The only implementation is os_linux.cc, and no other file makes system
// calls.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace windlass::os {

// Zeroed memory of at least `bytes`, huge pages advised where it is large enough; nullptr when there is none.
// Starts on a huge page boundary when bytes >= one huge page. unmap() takes what map() was given.
std::byte* map(size_t bytes);
void unmap(std::byte* p, size_t bytes);

// Blocks while *word == expected, until a wake or until `timeout_ns` have passed (< 0: no limit). May return early.
void wait(const std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns);
void wake_all(const std::atomic<uint32_t>& word);

int64_t now_ns();       // monotonic
uint64_t random_u64();  // from the kernel: for incarnations, never for numbers that must repeat
int cores();            // that this process may run on

// Goes up by one in the child of every fork; who remembers another number is a copy made by a fork.
uint32_t fork_generation();

}  // namespace windlass::os
