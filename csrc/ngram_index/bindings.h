#pragma once

#include <pybind11/pybind11.h>

namespace specens {

void bind_ngram_index(pybind11::module_& module);

}  // namespace specens
