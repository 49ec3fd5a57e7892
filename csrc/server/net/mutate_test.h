// Structure-aware mutation of frames: fields take values that matter, with the checksums put right afterwards or not;
// streams are cut, spliced and repeated.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "server/net/peer_test.h"

namespace windlass::test {

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random(seed) {}

  // A number that is wrong in an interesting way.
  uint64_t number() {
    static constexpr uint64_t kOdd[] = {0,
                                        1,
                                        2,
                                        7,
                                        8,
                                        15,
                                        16,
                                        63,
                                        64,
                                        65,
                                        127,
                                        128,
                                        255,
                                        256,
                                        4095,
                                        4096,
                                        65535,
                                        65536,
                                        (1u << 20) - 1,
                                        1u << 20,
                                        (1u << 20) + 1,
                                        1u << 28,
                                        (1u << 28) + 64,
                                        1u << 30,
                                        (1u << 30) + 64,
                                        0x7FFFFFFF,
                                        0x80000000,
                                        0xFFFFFFC0,
                                        0xFFFFFFFF,
                                        uint64_t{1} << 32,
                                        uint64_t{1} << 40,
                                        uint64_t{1} << 42,
                                        uint64_t{1} << 62,
                                        uint64_t{1} << 63,
                                        ~uint64_t{63},
                                        ~uint64_t{0}};
    return random.below(4) == 0 ? random.next() : kOdd[random.below(std::size(kOdd))];
  }

  // Changes the bytes in place, at random or where the whole words are.
  void change_bytes(std::string* bytes) {
    if (bytes->empty()) return;
    const size_t at = random.below(bytes->size());
    switch (random.below(4)) {
      case 0: (*bytes)[at] = static_cast<char>((*bytes)[at] ^ (1 << random.below(8))); break;
      case 1: (*bytes)[at] = static_cast<char>(random.next()); break;
      case 2: {
        const uint64_t x = number();
        const size_t word = at & ~size_t{7};
        std::memcpy(&(*bytes)[word], &x, std::min(size_t{1} << random.below(4), bytes->size() - word));
        break;
      }
      default:
        std::fill_n(bytes->begin() + static_cast<ptrdiff_t>(at), std::min<size_t>(16, bytes->size() - at), '\xFF');
    }
  }

  void change(FrameHead* h) {
    switch (random.below(15)) {
      case 0: h->op = static_cast<uint8_t>(random.below(wire::kOpMax + 3)); break;
      case 1: h->op = static_cast<uint8_t>(number()); break;
      case 2: h->flags = static_cast<uint16_t>(number()); break;
      case 3: h->request = number(); break;
      case 4: h->session = number(); break;
      case 5: h->app = static_cast<uint32_t>(number()); break;
      case 6: h->object = static_cast<uint32_t>(random.below(2) == 0 ? random.below(8) : number()); break;
      case 7: h->deadline_ms = static_cast<uint32_t>(number()); break;
      case 8: h->lane = static_cast<uint8_t>(number()); break;
      case 9: h->dtype_in = static_cast<uint8_t>(random.below(6)); break;
      case 10: h->dtype_out = static_cast<uint8_t>(random.below(6)); break;
      case 11: h->priority = static_cast<uint8_t>(number()); break;
      case 12: h->version = static_cast<uint8_t>(number()); break;
      case 13: h->work_bytes = number(); break;
      default: h->magic = static_cast<uint32_t>(number());
    }
  }
  void change(FramePart::Head* p) {
    switch (random.below(8)) {
      case 0: p->shard = static_cast<uint32_t>(random.below(2) == 0 ? random.below(4) : number()); break;
      case 1: p->term = static_cast<uint32_t>(number()); break;
      case 2: p->sequence = random.below(2) == 0 ? p->sequence + random.below(5) - 2 : number(); break;
      case 3: p->clock = number(); break;
      case 4: p->items = static_cast<uint32_t>(number()); break;
      case 5: p->value = number(); break;
      case 6:
        p->flags = static_cast<uint16_t>(random.below(2) == 0 ? p->flags ^ (1u << random.below(15)) : number());
        break;
      default: p->status = static_cast<uint8_t>(random.below(2) == 0 ? random.below(20) : number());
    }
  }
  // Fields and contents; lengths and checksums will be right.
  void change(Frame* frame) {
    for (uint64_t n = 1 + random.below(3); n != 0; --n) {
      const bool has_parts = !frame->parts.empty();
      FramePart* const part = has_parts ? &frame->parts[random.below(frame->parts.size())] : nullptr;
      switch (has_parts ? random.below(10) : random.below(2)) {
        case 0: change(&frame->header); break;
        case 1: {
          frame->hyper.resize(random.below(14));
          if (!frame->hyper.empty()) frame->hyper[random.below(frame->hyper.size())] = std::bit_cast<double>(number());
          break;
        }
        case 2:
        case 3: change(&part->part); break;
        case 4: change_bytes(&part->items); break;
        case 5: change_bytes(&part->numbers); break;
        case 6:
          part->items.resize(random.below(2) == 0 ? random.below(200) : part->items.size() + random.below(16));
          break;
        case 7: part->numbers.resize(random.below(2 * part->numbers.size() + 70)); break;
        case 8: {
          part->more.resize(random.below(5));
          for (wire::EntryItem& entry : part->more) {
            entry.shard = static_cast<uint32_t>(random.below(3) != 0 ? part->part.shard + 1 : number());
            entry.items = random.below(3) != 0 ? part->part.items : static_cast<uint32_t>(number());
            entry.sequence = part->part.sequence + random.below(3);
          }
          break;
        }
        default:
          if (random.below(2) == 0) {
            frame->parts.push_back(FramePart(*part));
          } else {
            frame->parts.pop_back();
          }
      }
    }
  }
  // Lengths and counts as they travel, with the header's checksum right.
  void change_lengths(std::string* bytes) {
    wire::Header h;
    std::memcpy(&h, bytes->data(), sizeof h);
    const bool has_block = h.blocks != 0 && bytes->size() >= 2 * limits::kSectionBytes;
    switch (random.below(has_block ? 6 : 2)) {
      case 0: h.length = random.below(2) == 0 ? h.length + 64 * (random.below(5) - 2) : number(); break;
      case 1: h.blocks = static_cast<uint32_t>(random.below(2) == 0 ? h.blocks + random.below(3) - 1 : number()); break;
      default: {
        wire::Block b;
        std::memcpy(&b, bytes->data() + sizeof h, sizeof b);
        switch (random.below(6)) {
          case 0: b.body_bytes = static_cast<uint32_t>(number()); break;
          case 1: b.numbers_bytes = static_cast<uint32_t>(number()); break;
          case 2: b.entries = static_cast<uint16_t>(random.below(2) == 0 ? random.below(6) : number()); break;
          case 3: b.hypers = static_cast<uint8_t>(number()); break;
          case 4: b.items = static_cast<uint32_t>(number()); break;
          default: b.flags = static_cast<uint16_t>(b.flags ^ (1u << random.below(16)));
        }
        wire::encode(b, reinterpret_cast<std::byte*>(bytes->data()) + sizeof h);
      }
    }
    wire::encode(h, reinterpret_cast<std::byte*>(bytes->data()));
  }

  // One frame, changed in one of these ways.
  std::string mutated(const Frame& frame) {
    Frame copy = frame;
    const uint64_t dice = random.below(10);
    if (dice < 5) {
      change(&copy);
      return copy.bytes();
    }
    if (dice < 7) {
      if (random.below(2) == 0) change(&copy);
      std::string bytes = copy.bytes();
      change_lengths(&bytes);
      return bytes;
    }
    std::string bytes = copy.bytes();
    for (uint64_t n = 1 + random.below(3); n != 0; --n) change_bytes(&bytes);
    return bytes;
  }

  // Frames that follow each other, some of them mutated; *count goes up by as many.
  std::string stream(const std::vector<Frame>& frames, uint64_t* count) {
    std::string all;
    std::vector<std::string> pieces;
    const size_t first = random.below(frames.size());
    for (size_t i = 0; i < frames.size(); ++i) {
      const bool harmed = i == first || random.below(3) == 0;
      pieces.push_back(harmed ? mutated(frames[i]) : frames[i].bytes());
      *count += harmed;
    }
    switch (random.below(8)) {
      case 0: std::swap(pieces[random.below(pieces.size())], pieces[random.below(pieces.size())]); break;
      case 1: pieces.push_back(pieces[random.below(pieces.size())]); break;
      case 2: pieces.erase(pieces.begin() + static_cast<ptrdiff_t>(random.below(pieces.size()))); break;
      default: break;
    }
    for (const std::string& p : pieces) all += p;
    switch (random.below(8)) {
      case 0: all.resize(random.below(all.size() + 1)); break;  // cut short
      case 1: {                                                 // spliced
        const std::string piece = all.substr(random.below(all.size() + 1), random.below(300));
        all.insert(random.below(all.size() + 1), piece);
        break;
      }
      case 2: {
        const std::string piece = all.substr(random.below(all.size() / 64 + 1) * 64, 64 * random.below(5));
        all.insert(random.below(all.size() / 64 + 1) * 64, piece);
        break;
      }
      default: break;
    }
    return all;
  }

  Random random;
};

}  // namespace windlass::test
