// Specs as the bytes that Python passes on and stores.
#pragma once

#include <string>

#include "bind/bind.h"
#include "messages/messages.h"

namespace windlass::bind {

inline ObjectSpec read_spec(const nb::bytes& bytes) {
  const std::string text(bytes.c_str(), bytes.size());
  wire::Reader reader(text);
  ObjectSpec spec;
  raise_if_error(decode(&reader, &spec));
  if (!reader.at_end()) throw StatusError{Status(Code::kProtocolError, "spec: bytes behind its end")};
  return spec;
}

inline nb::bytes write_spec(const ObjectSpec& spec) {
  wire::Writer writer;
  encode(spec, &writer);
  const std::string bytes = writer.take();
  return nb::bytes(bytes.data(), bytes.size());
}

}  // namespace windlass::bind
