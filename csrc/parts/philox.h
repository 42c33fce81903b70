// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) and the uniform made from it.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SPECENS_HOST_DEVICE __host__ __device__
#else
#define SPECENS_HOST_DEVICE
#endif

namespace specens {

struct PhiloxCounter {
    uint32_t word[4];
};

struct PhiloxKey {
    uint32_t word[2];
};

SPECENS_HOST_DEVICE inline PhiloxCounter philox_round(const PhiloxCounter& counter, const PhiloxKey& key) {
    const uint64_t first = uint64_t{0xD2511F53} * counter.word[0];
    const uint64_t second = uint64_t{0xCD9E8D57} * counter.word[2];
    return {{static_cast<uint32_t>(second >> 32) ^ counter.word[1] ^ key.word[0], static_cast<uint32_t>(second),
             static_cast<uint32_t>(first >> 32) ^ counter.word[3] ^ key.word[1], static_cast<uint32_t>(first)}};
}

SPECENS_HOST_DEVICE inline PhiloxCounter philox4x32_10(PhiloxCounter counter, PhiloxKey key) {
    for (int round = 0; round < 10; ++round) {
        counter = philox_round(counter, key);
        key.word[0] += 0x9E3779B9;
        key.word[1] += 0xBB67AE85;
    }
    return counter;
}

// The number in [0, 1) that decides one question of one request: 53 bits of the first two words.
// `seed` and `position` are read as two's complement, `step` and `stream` modulo 2^32.
SPECENS_HOST_DEVICE inline double philox_uniform(int64_t seed, int64_t position, int64_t step, int64_t stream) {
    const auto seed_bits = static_cast<uint64_t>(seed);
    const auto position_bits = static_cast<uint64_t>(position);
    const PhiloxKey key{{static_cast<uint32_t>(seed_bits), static_cast<uint32_t>(seed_bits >> 32)}};
    const PhiloxCounter counter{{static_cast<uint32_t>(position_bits), static_cast<uint32_t>(position_bits >> 32),
                                 static_cast<uint32_t>(step), static_cast<uint32_t>(stream)}};
    const PhiloxCounter random = philox4x32_10(counter, key);
    const uint64_t bits = (uint64_t{random.word[0] >> 5} << 26) + (random.word[1] >> 6);
    return static_cast<double>(bits) * (1.0 / 9007199254740992.0);  // 2^-53
}

}  // namespace specens
