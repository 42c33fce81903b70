#include "parts/rows.h"

#include <atomic>

#include "parts/instruction_set.h"

namespace specens {
namespace {

const RowKernels& kernels_of(InstructionSet set) { return SPECENS_OF_INSTRUCTION_SET(row_kernels, set); }

std::atomic<InstructionSet> set_in_use{best_instruction_set()};
std::atomic<const RowKernels*> kernels_in_use{&kernels_of(set_in_use)};

}  // namespace

const RowKernels& row_kernels() { return *kernels_in_use.load(std::memory_order_relaxed); }

InstructionSet instruction_set_in_use() { return set_in_use; }

void use_instruction_set(InstructionSet set) {
    set_in_use = set;
    kernels_in_use = &kernels_of(set);
}

}  // namespace specens
