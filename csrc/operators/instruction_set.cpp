#include "parts/instruction_set.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "parts/require.h"

namespace specens {
namespace {

// The code of the set in use, and the codes of those that this processor has as bits. code: the one to use from now on;
// -1: as before.
std::tuple<int64_t, int64_t> instruction_set(int64_t code) {
    int64_t usable = 0;
    for (int own = 0; own < num_instruction_sets; ++own) {
        usable |= int64_t{processor_has(static_cast<InstructionSet>(own))} << own;
    }
    require(code >= -1 && code < num_instruction_sets && (code < 0 || (usable >> code & 1) != 0),
            "this processor lacks the instruction set");
    if (code >= 0) {
        use_instruction_set(static_cast<InstructionSet>(code));
    }
    return {static_cast<int64_t>(instruction_set_in_use()), usable};
}

// Changes with the schemas of operators; `specens_kernels.backend` takes those of its own version alone.
int64_t operator_version() { return 4; }

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def("instruction_set(int code) -> (int, int)");
    library.def("operator_version() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CompositeExplicitAutograd, library) {
    library.impl("instruction_set", TORCH_BOX(&specens::instruction_set));
    library.impl("operator_version", TORCH_BOX(&specens::operator_version));
}
