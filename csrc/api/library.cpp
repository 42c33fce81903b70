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

constexpr int64_t most_reserved = int64_t{1} << 31;  // of each size
}  // namespace

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
        require(workspace != nullptr, "workspace: expected a pointer to one, got NULL");
        const specens_threads own = adopted("threads", threads, specens_threads_init());
        require(own.num_threads < 2 || own.run != nullptr, "threads: expected run, got NULL");
        *workspace = new specens_workspace{own, {}, {}, {}, {}, {}};
    });
}

int32_t specens_workspace_reserve(specens_workspace* workspace, const specens_sizes* sizes) {
    return guarded([&] {
        require(workspace != nullptr && sizes != nullptr, "workspace, sizes: expected both of them, got NULL");
        const Sizes most{adopted("sizes", sizes, specens_sizes_init())};
        for (const auto& [name, value] :
             {std::pair("vocab", most.vocab), std::pair("members", most.members),
              std::pair("draft_len", most.draft_len), std::pair("nodes", most.nodes), std::pair("edits", most.edits),
              std::pair("top", most.top), std::pair("batch", most.batch), std::pair("kept", most.kept)}) {
            if (value < 0 || value > most_reserved) {
                fail(name, "0 to " + std::to_string(most_reserved), std::to_string(value));
            }
        }
        workspace->reserve(most);
    });
}

void specens_workspace_destroy(specens_workspace* workspace) { delete workspace; }
