// Mechanisms that can be broken on purpose, by WINDLASS_BREAK=sequence,checksums,... A promise's test must turn red
// when the mechanism behind it is switched off; these are the switches. Nobody else sets them.
#pragma once

#include <cstdlib>
#include <string>

namespace windlass {

enum class Break {
  kSequence,   // pushes are applied as often as they come
  kChecksums,  // of items and numbers are not compared
  kBounds,     // a body may be read beyond its end
  kLengths,    // memory is taken for whatever length a frame claims
  kTerms,      // of a map that is out of date are accepted
  kNonfinite,  // numbers are accepted where they were to be refused
  kFence,      // memory that a lost server may still write stays where it is
  kMove,       // what a shard remembers of its sessions does not travel with it
  kGate,       // pulls wait for one iteration less than they should
};

// Whether a mechanism is broken. Asked only where it is about to do its work: off the path of a request that is right.
inline bool broken(Break which) {
  static const char* const kNames[] = {"sequence",  "checksums", "bounds", "lengths", "terms",
                                       "nonfinite", "fence",     "move",   "gate"};
  static const std::string set = [] {
    const char* text = std::getenv("WINDLASS_BREAK");
    return "," + std::string(text != nullptr ? text : "") + ",";
  }();
  return set.size() > 2 && set.find("," + std::string(kNames[static_cast<int>(which)]) + ",") != std::string::npos;
}

}  // namespace windlass
