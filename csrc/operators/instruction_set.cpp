#include "parts/instruction_set.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "parts/require.h"

namespace specens {
namespace {

// The codes of the set in use and of the best that this processor has. code: the one to use from now on; -1: as before.
std::tuple<int64_t, int64_t> instruction_set(int64_t code) {
    const auto best = static_cast<int64_t>(best_instruction_set());
    require(code >= -1 && code <= best, "this processor lacks the instruction set");
    if (code >= 0) {
        use_instruction_set(static_cast<InstructionSet>(code));
    }
    return {static_cast<int64_t>(instruction_set_in_use()), best};
}

// Changes with the schemas of operators; `specens_kernels.backend` takes those of its own version alone.
int64_t operator_version() { return 2; }

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
