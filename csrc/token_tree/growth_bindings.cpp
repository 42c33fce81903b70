// TreeGrowth for Python.
#include <pybind11/numpy.h>

#include "bindings/arrays.h"
#include "bindings/guarded.h"
#include "token_tree/bindings.h"
#include "token_tree/growth.h"

namespace specens {
namespace {

namespace py = pybind11;

using Growth = Guarded<TreeGrowth>;

void add_candidates(Growth& growth, const py::object& tokens, const py::object& probabilities) {
    const auto ids = as_array<int64_t>(tokens, "tokens", 2, "iu", "integers of shape [frontier, candidates]");
    const auto masses =
        as_array<double>(probabilities, "probabilities", 2, "f", "floats of shape [frontier, candidates]");
    const std::string shape = shape_text(ids), other_shape = shape_text(masses);
    const int64_t rows = ids.shape(0), columns = ids.shape(1);
    const std::vector<int64_t> own_ids = to_vector(ids);
    const std::vector<double> own_masses = to_vector(masses);
    growth.change([&](TreeGrowth& own) {
        const auto frontier = static_cast<int64_t>(own.frontier().size());
        if (rows != frontier) {
            fail("tokens", "a row for each of the frontier's " + std::to_string(frontier) + " nodes", shape);
        }
        if (shape != other_shape) {
            fail("probabilities", "the shape of tokens, " + shape, other_shape);
        }
        own.add(own_ids.data(), own_masses.data(), columns);
    });
}

py::tuple prune(const Growth& growth) {
    const TreeGrowth::Pruned pruned = growth.read([](const TreeGrowth& own) { return own.prune(); });
    return py::make_tuple(pruned.tree, to_array(pruned.tokens), to_array(pruned.candidates));
}

constexpr const char* growth_doc =
    R"(A draft tree while it grows; begun by `TokenTree.grow`.

    growth = TokenTree.grow(nodes=60, width=10)
    while len(growth.frontier) and steps_left:
        ...                                    # a draft step at the nodes of growth.frontier
        growth.add(tokens, probabilities)      # both [frontier, candidates]
    tree, tokens, candidates = growth.prune()

Candidates are numbered in the order in which they were added, row by row. The probability of a path is the product of the
draft probabilities along it; the nodes with the largest are kept, the earlier candidate on a tie.)";

constexpr const char* add_doc =
    R"(Add the candidates below the frontier's nodes, and choose the next frontier.

tokens: integers [frontier, candidates]. probabilities: floats [frontier, candidates] in [0, 1], the draft probability of
    each candidate after its node. A candidate of probability 0 is never kept, so it serves as padding.
Raises ValueError for another shape, dtype or range.)";

constexpr const char* prune_doc =
    R"(Return (tree, tokens, candidates): the TokenTree of the most probable candidates within the budget, and for each of
its nodes the token and the number of the candidate, int64 [nodes]. Growth may go on afterwards.)";

}  // namespace

void bind_tree_growth(py::module_& module) {
    py::class_<Growth> growth(module, "TreeGrowth", growth_doc);
    growth.attr("__module__") = "specens_kernels";
    growth
        .def_property_readonly(
            "frontier",
            [](const Growth& self) {
                return to_array(self.read([](const TreeGrowth& own) { return own.frontier(); }));
            },
            "int64 [frontier]: the candidates to expand next, the most probable first; [-1], the root position, at "
            "first;\n"
            "empty when the tree is complete.")
        .def_property_readonly(
            "expected_length",
            [](const Growth& self) { return self.read([](const TreeGrowth& own) { return own.expected_length(); }); },
            "The sum of the path probabilities that `prune` would keep: the expected accepted length,\n"
            "were the draft distribution the target's. OPT-Tree stops when a step adds too little to it.")
        .def("add", &add_candidates, py::arg("tokens"), py::arg("probabilities"), add_doc)
        .def("prune", &prune, prune_doc);
}

}  // namespace specens
