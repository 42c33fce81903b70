// The tile functions of every instruction set that this processor runs. Compiled by test_row_kernels.py.
#include "parts/instruction_set.h"
#include "parts/rows.h"

using namespace specens;

// nullptr where the processor lacks it.
extern "C" const RowKernels* kernels_of(int set) {
    if (set > static_cast<int>(best_instruction_set())) {
        return nullptr;
    }
    switch (static_cast<InstructionSet>(set)) {
#if defined(__x86_64__)
        case InstructionSet::avx512:
            return &row_kernels_avx512();
        case InstructionSet::avx2:
            return &row_kernels_avx2();
#endif
        default:
            return &row_kernels_plain();
    }
}
