// What specens.h tells of the library, and its workspaces.
#include <cstring>
#include <string>

#include "api/guarded.h"
#include "api/workspace.h"
#include "parts/arguments.h"
#include "parts/instruction_set.h"

namespace specens {

namespace {
thread_local std::string last_error;
}

void set_last_error(const char* message) noexcept {
    try {
        last_error = message;
    } catch (...) {
        last_error.clear();
    }
}

}  // namespace specens

using namespace specens;

int32_t specens_abi_version(void) { return SPECENS_ABI_VERSION; }

const char* specens_last_error(void) { return last_error.c_str(); }

const char* specens_instruction_set(void) { return instruction_set_name(instruction_set_in_use()); }

int32_t specens_use_instruction_set(const char* name) {
    return guarded([&] {
        require(name != nullptr, "name: expected an instruction set, got NULL");
        for (int code = 0; code < num_instruction_sets; ++code) {
            const auto set = static_cast<InstructionSet>(code);
            if (processor_has(set) && std::strcmp(name, instruction_set_name(set)) == 0) {
                use_instruction_set(set);
                return;
            }
        }
        fail("name", "an instruction set that this processor has", name);
    });
}

int32_t specens_workspace_create(const specens_threads* threads, specens_workspace** workspace) {
    return guarded([&] {
        require(workspace != nullptr, "workspace: expected a place for it, got NULL");
        const specens_threads own = adopted("threads", threads, specens_threads_init());
        require(own.num_threads < 2 || own.run != nullptr, "threads: expected run, got NULL");
        *workspace = new specens_workspace{own, {}, {}, {}, {}, {}};
    });
}

void specens_workspace_destroy(specens_workspace* workspace) { delete workspace; }
