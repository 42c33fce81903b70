// What NEON has no instruction for.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace specens {

// Bit i is set where word i of the four masks, of 0 or all ones, is.
inline uint32_t bits_of(uint32x4_t first, uint32x4_t second, uint32x4_t third, uint32x4_t fourth) {
    const auto of = [](uint32x4_t mask, uint32_t lowest) {
        const uint32_t each[4] = {lowest, lowest << 1, lowest << 2, lowest << 3};
        return vandq_u32(mask, vld1q_u32(each));
    };
    return vaddvq_u32(
        vorrq_u32(vorrq_u32(of(first, 1), of(second, 1 << 4)), vorrq_u32(of(third, 1 << 8), of(fourth, 1 << 12))));
}

}  // namespace specens
