// The tile functions of every instruction set that this processor runs. Compiled by test_row_kernels.py.
#include "parts/instruction_set.h"
#include "parts/rows.h"

// nullptr where the processor lacks it.
extern "C" const specens::RowKernels* kernels_of(int code) {
    using namespace specens;
    const auto set = static_cast<InstructionSet>(code);
    return processor_has(set) ? &SPECENS_OF_INSTRUCTION_SET(row_kernels, set) : nullptr;
}
