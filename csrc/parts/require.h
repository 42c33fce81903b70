// What an operation requires of its arguments; Python sees a ValueError.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace specens {

[[noreturn]] inline void fail(const std::string& argument, const std::string& expected, const std::string& got) {
    throw std::invalid_argument(argument + ": expected " + expected + ", got " + got);
}

inline void require(bool holds, const char* message) {
    if (!holds) {
        throw std::invalid_argument(message);
    }
}

}  // namespace specens
