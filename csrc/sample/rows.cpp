#include "sample/rows.h"

#include "parts/instruction_set.h"

namespace specens {

const ScoreKernels& score_kernels() {
    switch (instruction_set_in_use()) {
#if defined(__x86_64__)
        case InstructionSet::avx512:
            return score_kernels_avx512();
        case InstructionSet::avx2:
            return score_kernels_avx2();
#endif
        default:
            return score_kernels_plain();
    }
}

}  // namespace specens
