// Minimax coefficients of 2^x on [-1/2, 1/2] under relative error, the constant held at 1.
#pragma once

namespace specens {
constexpr float exp2_coefficients[6] = {1.0f,           0x1.62e42ap-1f, 0x1.ebf9bcp-3f,
                                        0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba14p-10f};
}  // namespace specens
