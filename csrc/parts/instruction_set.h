// Which of the compiled instruction sets this processor runs, and which one operators take.
#pragma once

namespace specens {

enum class InstructionSet { plain, avx2, avx512, neon };  // of those that a processor has, the last is the best

constexpr const char* instruction_set_names[] = {"plain", "avx2", "avx512", "neon"};
constexpr int num_instruction_sets = 4;

// The best at first.
InstructionSet instruction_set_in_use();
void use_instruction_set(InstructionSet set);

inline bool processor_has(InstructionSet set) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    switch (set) {
        case InstructionSet::avx2:
            return avx2;
        case InstructionSet::avx512:
            return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        default:
            break;
    }
#elif defined(__aarch64__)
    if (set == InstructionSet::neon) {
        return true;
    }
#endif
    return set == InstructionSet::plain;
}

inline InstructionSet best_instruction_set() {
    auto best = InstructionSet::plain;
    for (int code = 0; code < num_instruction_sets; ++code) {
        best = processor_has(static_cast<InstructionSet>(code)) ? static_cast<InstructionSet>(code) : best;
    }
    return best;
}

inline const char* instruction_set_name(InstructionSet set) { return instruction_set_names[static_cast<int>(set)]; }

// The one of `NAME_plain`, `NAME_avx2`, ... that is compiled for a set, of functions without arguments.
#if defined(__x86_64__)
#define SPECENS_OF_INSTRUCTION_SET(name, set) \
    ((set) == InstructionSet::avx512 ? name##_avx512() : (set) == InstructionSet::avx2 ? name##_avx2() : name##_plain())
#elif defined(__aarch64__)
#define SPECENS_OF_INSTRUCTION_SET(name, set) ((set) == InstructionSet::neon ? name##_neon() : name##_plain())
#else
#define SPECENS_OF_INSTRUCTION_SET(name, set) name##_plain()
#endif

}  // namespace specens
