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
  h.object = static_cast<uint32_t>(random->next());
  h.deadline_ms = static_cast<uint32_t>(random->next());
  h.lane = static_cast<uint8_t>(random->below(2));
  h.priority = static_cast<uint8_t>(random->below(256));
  h.dtype_in = static_cast<uint8_t>(random->below(5));
  h.dtype_out = static_cast<uint8_t>(random->below(5));
  h.parts = static_cast<uint32_t>(random->below(limits::kPartsMax + 1));
  h.extension_bytes = static_cast<uint32_t>(random->below(limits::kExtensionBytesMax / kBytes + 1) * kBytes);
  h.extension_crc = static_cast<uint32_t>(random->next());
  const uint64_t least = h.extension_bytes + uint64_t{h.parts} * kBytes;
  h.length = least + random->below((limits::kFrameBytesMax - least) / kBytes + 1) * kBytes;
  return h;
}

Part some_part(test::Random* random) {
  Part p;
  p.shard = static_cast<uint32_t>(random->next());
  p.term = static_cast<uint32_t>(random->next());
  p.sequence = random->next();
  p.clock = random->next();
  p.items = static_cast<uint32_t>(random->next());
  p.items_bytes = static_cast<uint32_t>(random->below(uint64_t{limits::kItemsBytesMax} + 1));
  p.numbers_bytes = random->below(limits::kNumbersBytesMax + 1);
  p.items_crc = static_cast<uint32_t>(random->next());
  p.numbers_crc = static_cast<uint32_t>(random->next());
  p.value = random->next();
  p.flags = static_cast<uint16_t>(random->next());
  p.status = static_cast<uint8_t>(random->next());
  return p;
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

// A list of extensions that ends with its allocation, so that the sanitizer sees a read too many.
class Extensions {
 public:
  void add(uint16_t type, uint16_t length, const std::string& content) {
    Writer w;
    w.put(type);
    w.put(length);
    w.put(uint32_t{0});
    w.put_bytes(content);
    bytes_ += w.take();
  }
  void pad(size_t to) { bytes_.resize(to); }
  void pad() { bytes_.resize(padded(bytes_.size())); }
  size_t size() const { return bytes_.size(); }
  Status read(double* hyper, size_t* n) const {
    const auto copy = std::make_unique_for_overwrite<std::byte[]>(bytes_.size());
    std::memcpy(copy.get(), bytes_.data(), bytes_.size());
    Places places;
    return read_extensions(copy.get(), bytes_.size(), hyper, n, &places);
  }
  Status read() const {
    double hyper[limits::kPushNumbersMax];
    size_t n = 0;
    return read(hyper, &n);
  }

 private:
  std::string bytes_;
};

std::string doubles(std::initializer_list<double> values) {
  Writer w;
  for (const double v : values) w.put(v);
  return w.take();
}

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

TEST(a_part_comes_back_as_it_was_sent) {
  test::Random random(test::seed());
  for (int i = 0; i < 10'000; ++i) {
    const Part sent = some_part(&random);
    Part got;
    CHECK_OK(decoded(sent, &got));
    CHECK(same(sent, got));
    CHECK_EQ(got.bytes() % kBytes, 0u);
    CHECK(got.bytes() >= uint64_t{sent.items_bytes} + sent.numbers_bytes);
    CHECK(got.bytes() < uint64_t{sent.items_bytes} + sent.numbers_bytes + 2 * kBytes);
  }
}

// The numbers of docs/formats/wire.md, byte for byte.
TEST(fields_lie_where_the_document_says) {
  Header h;
  h.op = 0x87;
  h.flags = 0x0201;
  h.length = 0x4040;
  h.request = 0x1112131415161718;
  h.session = 0x2122232425262728;
  h.app = 0x31323334;
  h.object = 0x41424344;
  h.deadline_ms = 0x51525354;
  h.lane = 1;
  h.dtype_in = 2;
  h.dtype_out = 3;
  h.parts = 5;
  h.extension_bytes = 64;
  h.extension_crc = 0x61626364;
  std::byte bytes[kBytes];
  encode(h, bytes);
  const unsigned char want[60] = {0x57, 0x4C, 0x46, 0x31, 1,    0x87, 0x01, 0x02, 0x40, 0x40, 0,    0,
                                  0,    0,    0,    0,    0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
                                  0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21, 0x34, 0x33, 0x32, 0x31,
                                  0x44, 0x43, 0x42, 0x41, 0x54, 0x53, 0x52, 0x51, 1,    2,    3,    0,
                                  5,    0,    0,    0,    0x40, 0,    0,    0,    0x64, 0x63, 0x62, 0x61};
  CHECK(std::memcmp(bytes, want, sizeof want) == 0);
  uint32_t crc = 0;
  std::memcpy(&crc, bytes + 60, 4);
  CHECK_EQ(crc, crc32c(want, 60));

  Part p;
  p.shard = 0x01020304;
  p.term = 0x11121314;
  p.sequence = 0x2122232425262728;
  p.clock = 0x3132333435363738;
  p.items = 0x41424344;
  p.items_bytes = 0x0000FF01;
  p.numbers_bytes = 0x0000FF02;
  p.items_crc = 0x51525354;
  p.numbers_crc = 0x61626364;
  p.value = 0x7172737475767778;
  p.flags = 0x8182;
  p.status = 9;
  encode(p, bytes);
  const unsigned char part[60] = {0x04, 0x03, 0x02, 0x01, 0x14, 0x13, 0x12, 0x11, 0x28, 0x27, 0x26, 0x25,
                                  0x24, 0x23, 0x22, 0x21, 0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31,
                                  0x44, 0x43, 0x42, 0x41, 0x01, 0xFF, 0,    0,    0x02, 0xFF, 0,    0,
                                  0,    0,    0,    0,    0x54, 0x53, 0x52, 0x51, 0x64, 0x63, 0x62, 0x61,
                                  0x78, 0x77, 0x76, 0x75, 0x74, 0x73, 0x72, 0x71, 0x82, 0x81, 9,    0};
  CHECK(std::memcmp(bytes, part, sizeof part) == 0);
}

TEST(every_flipped_bit_of_a_header_or_a_part_is_noticed) {
  test::Random random(test::seed());
  for (int i = 0; i < 50; ++i) {
    check_every_flip_is_noticed(some_header(&random));
    check_every_flip_is_noticed(some_part(&random));
  }
  check_every_flip_is_noticed(Part{});
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
    Part p;
    CHECK_CODE(decode(bytes, &h), Code::kProtocolError);
    CHECK_CODE(decode(bytes, &p), Code::kProtocolError);
  }
}

TEST(lengths_beyond_the_limits_are_refused_before_anything_is_done) {
  constexpr uint64_t kHuge[] = {uint64_t{1} << 31, 0xFFFFFFFFu,   uint64_t{1} << 32,       uint64_t{1} << 63,
                                ~uint64_t{0},      ~uint64_t{63}, (uint64_t{1} << 63) - 64};
  Header ok;
  ok.op = static_cast<uint8_t>(Op::kPush);
  CHECK_OK(decoded(ok));
  for (const uint64_t n : kHuge) {
    Header h = ok;
    h.length = n & ~uint64_t{63};
    if (h.length > limits::kFrameBytesMax) CHECK_CODE(decoded(h), Code::kProtocolError);
    h.length = n | 1;  // no multiple of 64
    CHECK_CODE(decoded(h), Code::kProtocolError);
    h = ok;
    h.extension_bytes = static_cast<uint32_t>(n) & ~63u;
    h.length = limits::kFrameBytesMax;
    CHECK(h.extension_bytes == 0 || !decoded(h).ok());
    h = ok;
    h.parts = static_cast<uint32_t>(n);
    h.length = limits::kFrameBytesMax;
    CHECK(h.parts == 0 || !decoded(h).ok());
    Part p;
    p.numbers_bytes = n;
    CHECK_CODE(decoded(p), Code::kProtocolError);
    p = {};
    p.items_bytes = static_cast<uint32_t>(n);
    CHECK(p.items_bytes == 0 || !decoded(p).ok());
  }
  // The limits themselves, and one more.
  Header h = ok;
  h.length = limits::kFrameBytesMax;
  h.extension_bytes = limits::kExtensionBytesMax;
  h.parts = limits::kPartsMax;
  CHECK_OK(decoded(h));
  for (const auto& beyond : {&Header::parts, &Header::extension_bytes}) {
    Header more = h;
    more.*beyond += beyond == &Header::parts ? 1 : kBytes;
    CHECK_CODE(decoded(more), Code::kProtocolError);
  }
  h.length += kBytes;
  CHECK_CODE(decoded(h), Code::kProtocolError);
  Part p;
  p.items_bytes = limits::kItemsBytesMax;
  p.numbers_bytes = limits::kNumbersBytesMax;
  CHECK_OK(decoded(p));
  CHECK_EQ(p.bytes(), uint64_t{limits::kItemsBytesMax} + limits::kNumbersBytesMax);
  p.items_bytes += 1;
  CHECK_CODE(decoded(p), Code::kProtocolError);
  p.items_bytes = 0;
  p.numbers_bytes += 1;
  CHECK_CODE(decoded(p), Code::kProtocolError);
}

TEST(a_frame_that_is_too_short_for_its_parts_is_refused) {
  test::Random random(test::seed());
  for (int i = 0; i < 1000; ++i) {
    Header h = some_header(&random);
    const uint64_t least = h.extension_bytes + uint64_t{h.parts} * kBytes;
    h.length = least;
    CHECK_OK(decoded(h));
    if (least == 0) continue;
    h.length = least - kBytes;
    CHECK_CODE(decoded(h), Code::kProtocolError);
    h.length = random.below(least / kBytes) * kBytes;
    CHECK_CODE(decoded(h), Code::kProtocolError);
  }
}

TEST(other_versions_operations_and_dtypes_are_refused_by_name) {
  Header ok;
  ok.op = static_cast<uint8_t>(Op::kPull);
  const auto refused = [&](auto change, const char* named) {
    Header h = ok;
    change(&h);
    const Status status = decoded(h);
    CHECK_CODE(status, Code::kProtocolError);
    CHECK(status.message().find(named) != std::string::npos);
  };
  for (const int version : {0, 2, 255}) {
    refused([&](Header* h) { h->version = static_cast<uint8_t>(version); }, "version");
  }
  for (const int op : {0, kOpMax + 1, 0x7F, 0x80, 0x80 | (kOpMax + 1), 0xFF}) {
    refused([&](Header* h) { h->op = static_cast<uint8_t>(op); }, "operation");
  }
  for (const int dtype : {5, 128, 255}) {
    refused([&](Header* h) { h->dtype_in = static_cast<uint8_t>(dtype); }, "dtype");
    refused([&](Header* h) { h->dtype_out = static_cast<uint8_t>(dtype); }, "dtype");
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

TEST(hyperparameters_come_back_as_they_were_sent) {
  test::Random random(test::seed());
  for (size_t n = 0; n <= limits::kPushNumbersMax; ++n) {
    double sent[limits::kPushNumbersMax], got[limits::kPushNumbersMax];
    for (double& x : sent) x = random.unit() * 1e6 - 5e5;
    sent[0] = std::numeric_limits<double>::quiet_NaN();
    std::vector<std::byte> bytes;
    write_hyper(sent, n, &bytes);
    CHECK_EQ(bytes.size() % kBytes, 0u);
    size_t seen = 99;
    Places places;
    CHECK_OK(read_extensions(bytes.data(), bytes.size(), got, &seen, &places));
    CHECK_EQ(seen, n);
    CHECK(std::memcmp(sent, got, n * sizeof(double)) == 0);
  }
}

TEST(an_extension_that_is_not_known_is_passed_over_unless_it_must_be_understood) {
  double hyper[limits::kPushNumbersMax];
  size_t n = 0;
  for (const uint16_t unknown : {uint16_t{2}, uint16_t{77}, uint16_t{0x7FFF}}) {
    for (const uint16_t length : {uint16_t{0}, uint16_t{1}, uint16_t{7}, uint16_t{8}, uint16_t{40}}) {
      Extensions e;
      e.add(unknown, length, std::string((length + size_t{7}) & ~size_t{7}, 'x'));
      e.add(kHyperExtension, 16, doubles({1.5, 2.5}));
      e.pad();
      CHECK_OK(e.read(hyper, &n));
      CHECK_EQ(n, 2u);
      CHECK(hyper[0] == 1.5 && hyper[1] == 2.5);
      Extensions must;
      must.add(unknown | kMustUnderstand, length, std::string((length + size_t{7}) & ~size_t{7}, 'x'));
      must.pad();
      CHECK_CODE(must.read(), Code::kProtocolError);
    }
  }
  // Bit 15 on a type that is known without it does not make it known.
  Extensions e;
  e.add(kHyperExtension | kMustUnderstand, 8, doubles({1}));
  CHECK_CODE(e.read(), Code::kProtocolError);
}

TEST(a_list_of_extensions_ends_at_type_0_or_at_its_end) {
  Extensions nothing;
  CHECK_OK(nothing.read());
  Extensions e;
  e.add(0, 0, "");
  e.add(kMustUnderstand | 5, 0, "");  // behind the end: not looked at
  CHECK_OK(e.read());
  Extensions zeros;
  zeros.pad(limits::kExtensionBytesMax);
  CHECK_OK(zeros.read());
}

TEST(hyperparameters_beyond_their_limits_are_refused) {
  for (const uint16_t length : {uint16_t{1}, uint16_t{7}, uint16_t{9}, uint16_t{8 * limits::kPushNumbersMax + 8},
                                uint16_t{8 * limits::kPushNumbersMax + 1}, uint16_t{0xFFF8}, uint16_t{0xFFFF}}) {
    Extensions e;
    e.add(kHyperExtension, length, std::string(length, 'h'));
    e.pad();
    CHECK_CODE(e.read(), Code::kProtocolError);
  }
}

TEST(an_extension_that_is_longer_than_its_list_is_refused) {
  for (const uint16_t type : {uint16_t{1}, uint16_t{2}}) {
    for (size_t there = 0; there < 64; there += 8) {
      Extensions e;
      e.add(type, static_cast<uint16_t>(there + 8), std::string(there, 'x'));
      CHECK_CODE(e.read(), Code::kProtocolError);
    }
  }
}

// Whatever the bytes are, nothing is read behind them and no more than kPushNumbersMax numbers come out.
TEST(any_bytes_can_be_read_as_extensions) {
  test::Random random(test::seed());
  for (int i = 0; i < 20'000; ++i) {
    Extensions e;
    while (random.below(3) != 0) {
      const size_t n = random.below(80);
      const auto type = static_cast<uint16_t>(random.below(4) == 0 ? random.next() : random.below(4));
      const auto length = static_cast<uint16_t>(random.below(5) == 0 ? random.next() : n);
      std::string content(n, '\0');
      for (char& c : content) c = static_cast<char>(random.next());
      e.add(type, length, content);
    }
    if (random.below(2) == 0 && e.size() != 0) e.pad(random.below(e.size()));
    double hyper[limits::kPushNumbersMax + 1];
    hyper[limits::kPushNumbersMax] = 123.0;
    size_t n = 0;
    const Status status = e.read(hyper, &n);
    CHECK(status.ok() || status.code() == Code::kProtocolError);
    CHECK(n <= limits::kPushNumbersMax);
    CHECK(hyper[limits::kPushNumbersMax] == 123.0);
  }
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
