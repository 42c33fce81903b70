// What an operator requires of its arguments; Python sees a ValueError.
#pragma once

#include <stdexcept>

namespace specens {

inline void require(bool holds, const char* message) {
    if (!holds) {
        throw std::invalid_argument(message);
    }
}

}  // namespace specens
