// _host: host objects, and what Python asks about this build.
#include <pybind11/pybind11.h>
#include <torch/headeronly/version.h>

#include <string>

#include "ngram_index/bindings.h"
#include "parts/instruction_set.h"
#include "token_tree/bindings.h"

namespace py = pybind11;

namespace {

std::string compiler() {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "unknown";
#endif
}

py::tuple compiled_instruction_sets() {
#if defined(__x86_64__)
    return py::make_tuple("avx512", "avx2", "plain");
#elif defined(__aarch64__)
    return py::make_tuple("neon", "plain");
#else
    return py::make_tuple("plain");
#endif
}

py::dict build_info() {
    py::dict info;
    info["version"] = SPECENS_VERSION;
    info["compiler"] = compiler();
    info["torch_headers"] = TORCH_VERSION;
    info["instruction_sets"] = compiled_instruction_sets();
    info["instruction_set"] = specens::instruction_set_name(specens::best_instruction_set());
    info["cuda_architectures"] = py::str(SPECENS_CUDA_ARCHITECTURES).attr("split")();
    return info;
}

}  // namespace

PYBIND11_MODULE(_host, module) {
    module.doc() = "Host objects of specens_kernels, and what this build was made of.";
    module.def("build_info", &build_info,
               "Return a dict about this build: version, compiler, torch_headers (the version compiled against),\n"
               "instruction_sets (compiled in), instruction_set (the one this processor runs), cuda_architectures\n"
               "(a list, empty where the CUDA kernels were not built).");
    specens::bind_token_tree(module);
    specens::bind_ngram_index(module);
}
