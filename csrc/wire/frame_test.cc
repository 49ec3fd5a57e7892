#include "wire/frame.h"

#include <cstring>
#include <limits>
#include <memory>

#include "base/crc32c.h"
#include "base/test.h"

namespace windlass::wire {
namespace {

constexpr size_t kBytes = limits::kSectionBytes;

// A header that follows the rules, with anything in the fields that may hold anything.
Header some_header(test::Random* random) {
  Header h;
  h.op = static_cast<uint8_t>(1 + random->below(kOpMax)) | (random->below(2) == 0 ? kAnswer : uint8_t{0});
  h.flags = static_cast<uint16_t>(random->next());
  h.request = random->next();
  h.session = random->next();
  h.app = static_cast<uint32_t>(random->next());
  h.deadline_ms = static_cast<uint32_t>(random->next());
  h.work_bytes = random->next();
  h.lane = static_cast<uint8_t>(random->below(2));
  h.priority = static_cast<uint8_t>(random->below(256));
  h.blocks = static_cast<uint32_t>(random->below(limits::kBlocksMax + 1));
  const uint64_t least = uint64_t{h.blocks} * kBytes;
  h.length = least + random->below((limits::kFrameBytesMax - least) / kBytes + 1) * kBytes;
  return h;
}

Block some_block(test::Random* random) {
  Block b;
  b.object = static_cast<uint32_t>(random->next());
  b.op = static_cast<uint8_t>(random->next());
  b.dtype_in = static_cast<uint8_t>(random->next());
  b.dtype_out = static_cast<uint8_t>(random->next());
  b.hypers = static_cast<uint8_t>(random->next());
  b.flags = static_cast<uint16_t>(random->next());
  b.entries = static_cast<uint16_t>(random->next());
  b.label = static_cast<uint32_t>(random->next());
  b.clock = random->next();
  b.term = static_cast<uint32_t>(random->next());
  b.shard = static_cast<uint32_t>(random->next());
  b.sequence = random->next();
  b.items = static_cast<uint32_t>(random->next());
  b.body_bytes = static_cast<uint32_t>(random->below(uint64_t{limits::kItemsBytesMax} + 1));
  b.numbers_bytes = static_cast<uint32_t>(random->below(limits::kNumbersBytesMax + 1));
  b.body_crc = static_cast<uint32_t>(random->next());
  b.numbers_crc = static_cast<uint32_t>(random->next());
  return b;
}

// What decode() says of a section whose checksum is right.
template <class Section>
Status decoded(Section section, Section* out) {
  std::byte bytes[kBytes];
  encode(section, bytes);
  return decode(bytes, out);
}
template <class Section>
Status decoded(const Section& section) {
  Section out;
  return decoded(section, &out);
}

// Everything but the checksum, which encode() fills in.
template <class Section>
bool same(Section a, Section b) {
  a.crc = b.crc = 0;
  return std::memcmp(&a, &b, sizeof a) == 0;
}

template <class Section>
void check_every_flip_is_noticed(const Section& section) {
  std::byte bytes[kBytes];
  encode(section, bytes);
  Section out;
  for (size_t bit = 0; bit < 8 * kBytes; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    CHECK_CODE(decode(bytes, &out), Code::kProtocolError);
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  CHECK_OK(decode(bytes, &out));
}

// A block of a request and its body, which ends with its allocation, so that the sanitizer sees a read too many.
struct Sent {
  Block block;
  std::string body;
  template <class T>
  void put(const T& value) {
    body.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  Status read(Body* out, std::string* rest = nullptr) {
    block.body_bytes = static_cast<uint32_t>(body.size());
    copy = std::make_unique_for_overwrite<std::byte[]>(body.size());
    std::memcpy(copy.get(), body.data(), body.size());
    const Status status = wire::read(block, copy.get(), out);
    if (status.ok() && rest != nullptr) rest->assign(reinterpret_cast<const char*>(out->rest), out->rest_bytes);
    return status;
  }
  std::unique_ptr<std::byte[]> copy;
};

}  // namespace

TEST(a_header_comes_back_as_it_was_sent) {
  test::Random random(test::seed());
  for (int i = 0; i < 10'000; ++i) {
    const Header sent = some_header(&random);
    Header got;
    CHECK_OK(decoded(sent, &got));
    CHECK(same(sent, got));
    CHECK(got.answer() == ((sent.op & kAnswer) != 0));
    CHECK_EQ(static_cast<int>(got.operation()), sent.op & 0x7F);
  }
}

TEST(a_block_comes_back_as_it_was_sent) {
  test::Random random(test::seed());
  for (int i = 0; i < 10'000; ++i) {
    const Block sent = some_block(&random);
    Block got;
    CHECK_OK(decoded(sent, &got));
    CHECK(same(sent, got));
    CHECK_EQ(got.bytes() % kBytes, 0u);
    CHECK(got.bytes() >= uint64_t{sent.body_bytes} + sent.numbers_bytes);
    CHECK(got.bytes() < uint64_t{sent.body_bytes} + sent.numbers_bytes + 2 * kBytes);
    Block answer = sent;
    const uint64_t value = random.next();
    answer.set_value(value);
    CHECK_EQ(answer.value(), value);
  }
}

// The numbers of docs/formats/wire.md, byte for byte.
TEST(fields_lie_where_the_document_says) {
  Header h;
  h.op = 0x90;
  h.flags = 0x0201;
  h.length = 0x4040;
  h.request = 0x1112131415161718;
  h.session = 0x2122232425262728;
  h.app = 0x31323334;
  h.deadline_ms = 0x41424344;
  h.work_bytes = 0x5152535455565758;
  h.blocks = 5;
  h.lane = 1;
  h.priority = 2;
  std::byte bytes[kBytes];
  encode(h, bytes);
  const unsigned char want[60] = {0x57, 0x4C, 0x46, 0x31, 2,    0x90, 0x01, 0x02, 0x40, 0x40, 0,    0,
                                  0,    0,    0,    0,    0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
                                  0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21, 0x34, 0x33, 0x32, 0x31,
                                  0x44, 0x43, 0x42, 0x41, 0x58, 0x57, 0x56, 0x55, 0x54, 0x53, 0x52, 0x51,
                                  5,    0,    0,    0,    1,    2,    0,    0,    0,    0,    0,    0};
  CHECK(std::memcmp(bytes, want, sizeof want) == 0);
  uint32_t crc = 0;
  std::memcpy(&crc, bytes + 60, 4);
  CHECK_EQ(crc, crc32c(want, 60));

  Block b;
  b.object = 0x01020304;
  b.op = 7;
  b.dtype_in = 1;
  b.dtype_out = 2;
  b.hypers = 8;
  b.flags = 0x8182;
  b.entries = 0x0A0B;
  b.label = 0x11121314;
  b.clock = 0x2122232425262728;
  b.term = 0x31323334;
  b.shard = 0x41424344;
  b.sequence = 0x5152535455565758;
  b.items = 0x61626364;
  b.body_bytes = 0x0000FF01;
  b.numbers_bytes = 0x0000FF02;
  b.body_crc = 0x71727374;
  b.numbers_crc = 0x75767778;
  encode(b, bytes);
  const unsigned char block[60] = {0x04, 0x03, 0x02, 0x01, 7,    1,    2,    8,    0x82, 0x81, 0x0B, 0x0A,
                                   0x14, 0x13, 0x12, 0x11, 0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21,
                                   0x34, 0x33, 0x32, 0x31, 0x44, 0x43, 0x42, 0x41, 0x58, 0x57, 0x56, 0x55,
                                   0x54, 0x53, 0x52, 0x51, 0x64, 0x63, 0x62, 0x61, 0x01, 0xFF, 0,    0,
                                   0x02, 0xFF, 0,    0,    0x74, 0x73, 0x72, 0x71, 0x78, 0x77, 0x76, 0x75};
  CHECK(std::memcmp(bytes, block, sizeof block) == 0);
}

TEST(every_flipped_bit_of_a_header_or_a_block_is_noticed) {
  test::Random random(test::seed());
  for (int i = 0; i < 50; ++i) {
    check_every_flip_is_noticed(some_header(&random));
    check_every_flip_is_noticed(some_block(&random));
  }
  check_every_flip_is_noticed(Block{});
}

TEST(random_bytes_are_no_section) {
  test::Random random(test::seed());
  for (int i = 0; i < 100'000; ++i) {
    std::byte bytes[kBytes];
    for (size_t at = 0; at < kBytes; at += 8) {
      const uint64_t x = random.next();
      std::memcpy(bytes + at, &x, sizeof x);
    }
    if (i % 2 == 0) std::memcpy(bytes, &kMagic, sizeof kMagic);
    Header h;
    Block b;
    CHECK_CODE(decode(bytes, &h), Code::kProtocolError);
    CHECK_CODE(decode(bytes, &b), Code::kProtocolError);
  }
}

TEST(lengths_beyond_the_limits_are_refused_before_anything_is_done) {
  constexpr uint64_t kHuge[] = {uint64_t{1} << 31, 0xFFFFFFFFu,   uint64_t{1} << 32,       uint64_t{1} << 63,
                                ~uint64_t{0},      ~uint64_t{63}, (uint64_t{1} << 63) - 64};
  Header ok;
  ok.op = static_cast<uint8_t>(Op::kStep);
  CHECK_OK(decoded(ok));
  for (const uint64_t n : kHuge) {
    Header h = ok;
    h.length = n & ~uint64_t{63};
    if (h.length > limits::kFrameBytesMax) CHECK_CODE(decoded(h), Code::kProtocolError);
    h.length = n | 1;  // no multiple of 64
    CHECK_CODE(decoded(h), Code::kProtocolError);
    h = ok;
    h.blocks = static_cast<uint32_t>(n);
    h.length = limits::kFrameBytesMax;
    CHECK(h.blocks == 0 || !decoded(h).ok());
    Block b;
    b.numbers_bytes = static_cast<uint32_t>(n);
    CHECK(b.numbers_bytes == 0 || !decoded(b).ok());
    b = {};
    b.body_bytes = static_cast<uint32_t>(n);
    CHECK(b.body_bytes == 0 || !decoded(b).ok());
  }
  // The limits themselves, and one more.
  Header h = ok;
  h.length = limits::kFrameBytesMax;
  h.blocks = limits::kBlocksMax;
  CHECK_OK(decoded(h));
  Header more = h;
  more.blocks += 1;
  CHECK_CODE(decoded(more), Code::kProtocolError);
  h.length += kBytes;
  CHECK_CODE(decoded(h), Code::kProtocolError);
  Block b;
  b.body_bytes = limits::kItemsBytesMax;
  b.numbers_bytes = static_cast<uint32_t>(limits::kNumbersBytesMax);
  CHECK_OK(decoded(b));
  CHECK_EQ(b.bytes(), uint64_t{limits::kItemsBytesMax} + limits::kNumbersBytesMax);
  b.body_bytes += 1;
  CHECK_CODE(decoded(b), Code::kProtocolError);
  b.body_bytes = 0;
  b.numbers_bytes += 1;
  CHECK_CODE(decoded(b), Code::kProtocolError);
}

TEST(a_frame_that_is_too_short_for_its_blocks_is_refused) {
  test::Random random(test::seed());
  for (int i = 0; i < 1000; ++i) {
    Header h = some_header(&random);
    const uint64_t least = uint64_t{h.blocks} * kBytes;
    h.length = least;
    CHECK_OK(decoded(h));
    if (least == 0) continue;
    h.length = least - kBytes;
    CHECK_CODE(decoded(h), Code::kProtocolError);
    h.length = random.below(least / kBytes) * kBytes;
    CHECK_CODE(decoded(h), Code::kProtocolError);
  }
}

TEST(other_versions_and_operations_are_refused_by_name) {
  Header ok;
  ok.op = static_cast<uint8_t>(Op::kStep);
  const auto refused = [&](auto change, const char* named) {
    Header h = ok;
    change(&h);
    const Status status = decoded(h);
    CHECK_CODE(status, Code::kProtocolError);
    CHECK(status.message().find(named) != std::string::npos);
  };
  for (const int version : {0, 1, 3, 255}) {
    const std::string both = "version " + std::to_string(version) + ", expected 2";
    refused([&](Header* h) { h->version = static_cast<uint8_t>(version); }, both.c_str());
  }
  for (const int op : {0, kOpMax + 1, 0x7F, 0x80, 0x80 | (kOpMax + 1), 0xFF}) {
    refused([&](Header* h) { h->op = static_cast<uint8_t>(op); }, "operation");
  }
  refused([](Header* h) { h->magic = 0x32464C57; }, "magic");
  for (uint8_t op = 1; op <= kOpMax; ++op) {
    CHECK(std::strcmp(name_of(static_cast<Op>(op)), "?") != 0);
  }
}

TEST(padding_reaches_the_next_section) {
  CHECK_EQ(padded(0), 0u);
  for (uint64_t n = 1; n < 1000; ++n) CHECK_EQ(padded(n), (n + 63) / 64 * 64);
  CHECK_EQ(padded(limits::kNumbersBytesMax), limits::kNumbersBytesMax);
}

TEST(a_body_comes_back_as_it_was_sent) {
  test::Random random(test::seed());
  for (int i = 0; i < 2'000; ++i) {
    Sent sent;
    sent.block.op = static_cast<uint8_t>(Op::kPush);
    sent.block.shard = 7;
    sent.block.sequence = 70;
    sent.block.entries = static_cast<uint16_t>(random.below(6));
    sent.block.hypers = static_cast<uint8_t>(random.below(limits::kPushNumbersMax + 1));
    const uint64_t value = random.next();
    const Places places{1, 2, random.next(), 4, 5, random.next(), 6};
    std::vector<double> hyper(sent.block.hypers);
    for (double& x : hyper) x = random.unit() * 1e6 - 5e5;
    if (!hyper.empty()) hyper[0] = std::numeric_limits<double>::quiet_NaN();
    if (random.below(2) == 0) sent.block.flags |= kHasValue;
    if (random.below(2) == 0) sent.block.flags |= kHasPlaces;
    if (random.below(2) == 0) sent.block.flags |= kRun;
    sent.block.items = sent.block.has(kRun) ? 0 : 3;
    if (sent.block.has(kHasValue)) sent.put(value);
    if (sent.block.has(kHasPlaces)) sent.put(places);
    for (const double x : hyper) sent.put(x);
    for (uint32_t k = 1; k < sent.block.entries; ++k) {
      if (sent.block.has(kRun)) {
        sent.put(uint64_t{70 + k});
      } else {
        sent.put(EntryItem{7 + 2 * k, 3 + k, 70 + k});
      }
    }
    const std::string tail(random.below(50), 'x');
    sent.body += tail;
    Body got;
    std::string rest;
    CHECK_OK(sent.read(&got, &rest));
    CHECK(rest == tail);
    CHECK_EQ(got.value, sent.block.has(kHasValue) ? value : 0);
    const Places read = got.places(sent.block);
    if (sent.block.has(kHasPlaces)) CHECK(std::memcmp(&read, &places, sizeof places) == 0);
    double numbers[limits::kPushNumbersMax];
    got.hyper(sent.block, numbers);
    if (!hyper.empty()) CHECK(std::memcmp(numbers, hyper.data(), hyper.size() * sizeof(double)) == 0);
    for (size_t k = hyper.size(); k < limits::kPushNumbersMax; ++k) CHECK_EQ(numbers[k], 0.0);
    for (uint32_t k = 0; k < sent.block.entries; ++k) {
      const EntryItem item = got.at(sent.block, k);
      CHECK_EQ(item.sequence, 70u + k);
      CHECK_EQ(item.shard, sent.block.has(kRun) ? 7 + k : 7 + 2 * k);
      CHECK_EQ(item.items, sent.block.has(kRun) ? 0 : 3 + k);
    }
  }
}

TEST(a_body_that_is_too_short_for_what_it_must_say_is_refused) {
  Sent sent;
  sent.block.op = static_cast<uint8_t>(Op::kPush);
  sent.block.entries = 4;
  sent.block.hypers = 2;
  sent.block.flags = kHasValue | kHasPlaces;
  const size_t least = 8 + sizeof(Places) + 2 * 8 + 3 * sizeof(EntryItem);
  Body body;
  for (size_t bytes = 0; bytes < least; ++bytes) {
    sent.body.assign(bytes, 'x');
    CHECK_CODE(sent.read(&body), Code::kInvalidArgument);
  }
  sent.body.assign(least, 'x');
  CHECK_OK(sent.read(&body));
}

TEST(blocks_beyond_their_limits_are_refused_by_name) {
  const auto refused = [](auto change, const char* named) {
    Sent sent;
    sent.block.op = static_cast<uint8_t>(Op::kPull);
    sent.block.entries = 1;
    sent.body.assign(1 << 20, 'x');
    change(&sent.block);
    Body body;
    const Status status = sent.read(&body);
    CHECK_CODE(status, Code::kInvalidArgument);
    CHECK(status.message().find(named) != std::string::npos);
  };
  for (const int op : {0, kOpMax + 1, 255}) refused([&](Block* b) { b->op = static_cast<uint8_t>(op); }, "operation");
  for (const int dtype : {5, 128, 255}) {
    refused([&](Block* b) { b->dtype_in = static_cast<uint8_t>(dtype); }, "dtype");
    refused([&](Block* b) { b->dtype_out = static_cast<uint8_t>(dtype); }, "dtype");
  }
  refused([](Block* b) { b->hypers = limits::kPushNumbersMax + 1; }, "hyperparameters");
  refused([](Block* b) { b->entries = limits::kBlockEntriesMax + 1; }, "entries");
}

TEST(a_reader_gives_back_what_a_writer_put) {
  Writer w;
  w.put(uint8_t{1});
  w.put(uint16_t{0x0203});
  w.put(uint32_t{0x04050607});
  w.put(uint64_t{0x08090A0B0C0D0E0F});
  w.put(1.5f);
  w.put(-2.5);
  w.put_bytes(std::string("a\0b", 3));
  const std::string bytes = w.take();
  CHECK_EQ(bytes.size(), 30u);
  Reader r(bytes);
  CHECK_EQ(r.get<uint8_t>(), 1);
  CHECK_EQ(r.get<uint16_t>(), 0x0203);
  CHECK_EQ(r.get<uint32_t>(), 0x04050607u);
  CHECK_EQ(r.get<uint64_t>(), 0x08090A0B0C0D0E0Fu);
  CHECK(r.get<float>() == 1.5f);
  CHECK(r.get<double>() == -2.5);
  CHECK(!r.at_end());
  CHECK(r.get_bytes(3) == std::string("a\0b", 3));
  CHECK(r.at_end());
}

// Buffers end with their allocation, so that the sanitizer sees a read too many.
TEST(a_reader_never_reads_beyond_and_stays_at_the_end) {
  test::Random random(test::seed());
  for (int i = 0; i < 20'000; ++i) {
    const size_t size = random.below(40);
    const auto bytes = std::make_unique_for_overwrite<char[]>(size);
    std::memset(bytes.get(), 0xFF, size);
    Reader r(bytes.get(), size);
    size_t left = size;
    bool ok = true;
    for (int step = 0; step < 12; ++step) {
      const size_t n = random.below(3) == 0 ? random.below(50) : size_t{1} << random.below(4);
      const bool fits = ok && n <= left;
      if (n == 1 || n == 2 || n == 4 || n == 8) {
        const uint64_t got = n == 1   ? r.get<uint8_t>()
                             : n == 2 ? r.get<uint16_t>()
                             : n == 4 ? r.get<uint32_t>()
                                      : r.get<uint64_t>();
        CHECK_EQ(got, fits ? ~uint64_t{0} >> (64 - 8 * n) : 0u);
      } else {
        CHECK_EQ(r.get_bytes(n).size(), fits ? n : 0);
      }
      ok = ok && (fits || n == 0);
      left = ok ? left - n : 0;
      CHECK(r.ok() == ok);
      CHECK_EQ(r.left(), left);
      CHECK(r.at_end() == (ok && left == 0));
    }
  }
  Reader r("x", 1);
  CHECK(r.get_bytes(~size_t{0}).empty() && !r.ok());
}

TEST(good_text_is_shown_as_it_is) {
  for (const char* good :
       {"", "plain text, 'quoted'", "two\nlines", "gr\xC3\xBC\xC3\x9F", "\xE6\x97\xA5\xE6\x9C\xAC\xE8\xAA\x9E",
        "\xF0\x9F\x98\x80", "\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80", "\xEF\xBF\xBF",
        "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    CHECK(printable(good) == good);
  }
}

TEST(bad_text_is_replaced_byte_by_byte) {
  const std::pair<std::string, std::string> kCases[] = {
      {"a\tb", "a?b"},                         // control characters
      {std::string("a\0b", 3), "a?b"},         //
      {"\x1B[31m", "?[31m"},                   // that a terminal would obey
      {"\x7F", "?"},                           //
      {"\x80", "?"},                           // a byte that continues nothing
      {"a\xC3", "a?"},                         // cut short
      {"\xC3(", "?("},                         //
      {"\xE6\x97", "??"},                      //
      {"\xE6\x97X", "??X"},                    //
      {"\xF0\x9F\x98", "???"},                 //
      {"\xC0\xAF", "??"},                      // longer than it must be
      {"\xC1\xBF", "??"},                      //
      {"\xE0\x80\xAF", "???"},                 //
      {"\xE0\x9F\xBF", "???"},                 //
      {"\xF0\x80\x80\xAF", "????"},            //
      {"\xF0\x8F\xBF\xBF", "????"},            //
      {"\xED\xA0\x80", "???"},                 // half of a pair
      {"\xED\xBF\xBF", "???"},                 //
      {"\xF4\x90\x80\x80", "????"},            // beyond the last letter
      {"\xF5\x80\x80\x80", "????"},            //
      {"\xFE\xFF", "??"},                      //
      {"\xFC\x84\x80\x80\x80\x80", "??????"},  //
      {"ok \xC3\xBC \xFF ok", "ok \xC3\xBC ? ok"},
  };
  for (const auto& [bad, want] : kCases) CHECK(printable(bad) == want);
}

TEST(text_from_a_peer_is_cut_at_its_limit_and_always_fit_to_be_shown) {
  CHECK_EQ(printable(std::string(1 << 20, 'x')).size(), limits::kMessageBytesMax);
  // A letter across the limit is not left half.
  std::string across(limits::kMessageBytesMax - 1, 'x');
  across += "\xC3\xBC";
  CHECK(printable(across) == std::string(limits::kMessageBytesMax - 1, 'x') + "?");
  test::Random random(test::seed());
  for (int i = 0; i < 20'000; ++i) {
    std::string text(random.below(40), '\0');
    for (char& c : text) {
      c = static_cast<char>(random.below(3) == 0 ? random.next() : 0x80 + random.below(0x80));
    }
    const std::string shown = printable(text);
    CHECK_EQ(shown.size(), text.size());
    CHECK(printable(shown) == shown);  // what is fit to be shown stays
    for (size_t k = 0; k < shown.size(); ++k) {
      CHECK(shown[k] == text[k] || shown[k] == '?');
      const auto c = static_cast<unsigned char>(shown[k]);
      CHECK(c == '\n' || (c >= 0x20 && c != 0x7F));
    }
  }
}

}  // namespace windlass::wire
