#pragma once

#include <pybind11/pybind11.h>

namespace specens {

void bind_token_tree(pybind11::module_& module);
void bind_tree_growth(pybind11::module_& module);

}  // namespace specens
