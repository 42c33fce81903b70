#include "uniforms/uniforms.h"

#include "parts/parallel.h"

namespace specens {

void write_uniforms(const UniformArguments& arguments, int64_t batch) {
    constexpr int64_t requests_per_thread = 4096;  // with fewer a second thread costs more than it saves
    parallel_for(batch, requests_per_thread, [&](int64_t begin, int64_t end) {
        for (int64_t request = begin; request < end; ++request) {
            write_uniform(arguments, request);
        }
    });
}

}  // namespace specens
