#include "sample/rows.h"

#include "parts/instruction_set.h"

namespace specens {

const ScoreKernels& score_kernels() {
    const InstructionSet set = instruction_set_in_use();
    return SPECENS_OF_INSTRUCTION_SET(score_kernels, set);
}

}  // namespace specens
