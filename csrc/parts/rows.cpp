#include "parts/rows.h"

#include "parts/instruction_set.h"

namespace specens {

const RowKernels& row_kernels() {
    static const RowKernels& kernels = []() -> const RowKernels& {
#if defined(__x86_64__)
        switch (best_instruction_set()) {
            case InstructionSet::avx512:
                return row_kernels_avx512();
            case InstructionSet::avx2:
                return row_kernels_avx2();
            case InstructionSet::plain:
                break;
        }
#endif
        return row_kernels_plain();
    }();
    return kernels;
}

}  // namespace specens
