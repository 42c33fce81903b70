#include "parts/draw.h"

namespace specens {

int64_t first_exceeding(const float* masses, int64_t count, double target) {
    constexpr int64_t group = 16;
    double before = 0;
    int64_t last = -1;
    for (int64_t first = 0; first < count; first += group) {
        const int64_t end = std::min(first + group, count);
        double sums[4] = {};
        for (int64_t i = first; i < end; ++i) {
            sums[i % 4] += masses[i];
        }
        const double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        if (sum > 0) {
            double running = before;
            for (int64_t i = first; i < end && before + sum > target; ++i) {
                running += masses[i];
                if (masses[i] > 0 && running > target) {
                    return i;
                }
            }
            for (int64_t i = first; i < end; ++i) {
                last = masses[i] > 0 ? i : last;
            }
        }
        before += sum;
    }
    return last;
}

}  // namespace specens
