// Mechanisms that can be broken on purpose, by WINDLASS_BREAK=sequence,checksums,... A promise's test must turn red
// when the mechanism behind it is switched off; these are the switches. Only tests set them.
#pragma once

#include <cstdlib>
#include <string>

namespace windlass {

enum class Break {
  kSequence,   // pushes are applied as often as they come
  kChecksums,  // checksums of bodies and numbers are not compared
  kBounds,     // a body may be read beyond its end
  kLengths,    // memory is taken for whatever length a frame claims
  kTerms,      // terms of an outdated map are accepted
  kNonfinite,  // NaN and infinity are accepted despite reject_nonfinite
  kFence,      // memory that a lost server may still write gets no fresh pages
  kMove,       // a shard's session records do not travel with it
  kGate,       // pulls wait for one iteration less than they should
  kAnswers,    // answers are made when gates open, and take whatever memory they need
  kReaders,    // servers let readers change what they ask to change
  kCapture,    // a checkpoint takes tensors as they are when it comes to them, not as they were at its cut
  kDeadlines,  // a caller waits for its request however long that takes
  kThreads,    // a thread that is not to be had ends the process
  kIdentity,   // servers take a rank and an object's number from whoever names them
};

// Whether a mechanism is broken. Called only where the mechanism is about to act; a comparison when none is.
inline bool broken(Break which) {
  static const char* const kNames[] = {"sequence",  "checksums", "bounds",    "lengths", "terms",
                                       "nonfinite", "fence",     "move",      "gate",    "answers",
                                       "readers",   "capture",   "deadlines", "threads", "identity"};
  static const std::string set = [] {
    const char* text = std::getenv("WINDLASS_BREAK");
    return "," + std::string(text != nullptr ? text : "") + ",";
  }();
  return set.size() > 2 && set.find("," + std::string(kNames[static_cast<int>(which)]) + ",") != std::string::npos;
}

}  // namespace windlass
