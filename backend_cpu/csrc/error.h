// One way to raise: everything printable, joined.
#pragma once
#include <sstream>
#include <stdexcept>

namespace hal_cpu {

template <class... T>
[[noreturn]] void fail(const T&... parts) {
  std::ostringstream text;
  text << "hal_cpu: ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

}  // namespace hal_cpu
