// Which of the compiled instruction sets this processor runs, and which one operators take.
#pragma once

namespace specens {

enum class InstructionSet { plain, avx2, avx512 };  // a processor that has one has those before it

// The best at first.
InstructionSet instruction_set_in_use();
void use_instruction_set(InstructionSet set);

inline InstructionSet best_instruction_set() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        return InstructionSet::avx512;
    }
    if (avx2) {
        return InstructionSet::avx2;
    }
#endif
    return InstructionSet::plain;
}

inline const char* instruction_set_name(InstructionSet set) {
    switch (set) {
        case InstructionSet::avx512:
            return "avx512";
        case InstructionSet::avx2:
            return "avx2";
        default:
            return "plain";
    }
}

}  // namespace specens
