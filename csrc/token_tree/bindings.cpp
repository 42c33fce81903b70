// TokenTree for Python.
#include "token_tree/bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/guarded.h"
#include "token_tree/acceptance.h"
#include "token_tree/growth.h"
#include "token_tree/tree.h"

namespace specens {
namespace {

namespace py = pybind11;

using Int64Array = py::array_t<int64_t>;
using WithoutGil = py::call_guard<py::gil_scoped_release>;  // of functions that see no Python object

constexpr int64_t padding_parent = -2;

std::vector<int64_t> integers(const py::object& values, const char* argument) {
    return to_vector(as_array<int64_t>(values, argument, 1, "iu", "integers of shape [nodes]"));
}

int64_t level_limit(const py::object& max_levels) {
    return max_levels.is_none() ? most_integer : as_integer(max_levels, "max_levels");
}

TokenTree from_parents(const py::object& parents, const py::object& child_ranks) {
    std::vector<int64_t> ranks;
    if (!child_ranks.is_none()) {
        ranks = integers(child_ranks, "child_ranks");
    }
    std::vector<int64_t> own = integers(parents, "parents");
    const py::gil_scoped_release released;
    return TokenTree(std::move(own), std::move(ranks));
}

TokenTree from_paths(const std::vector<py::object>& given) {
    std::vector<std::vector<int64_t>> paths;
    for (const py::object& path : given) {
        const std::string argument = "paths[" + std::to_string(paths.size()) + "]";
        paths.push_back(to_vector(as_array<int64_t>(path, argument.c_str(), 1, "iu", "integers of shape [ranks]")));
    }
    const py::gil_scoped_release released;
    return TokenTree::from_paths(std::move(paths));
}

TokenTree chains(const py::object& count, const py::object& length) {
    const int64_t own_count = as_integer(count, "count"), own_length = as_integer(length, "length");
    const py::gil_scoped_release released;
    return TokenTree::chains(own_count, own_length);
}

TokenTree branching(const py::object& values) {
    const std::vector<int64_t> branches =
        to_vector(as_array<int64_t>(values, "branches", 1, "iu", "integers of shape [levels]"));
    const py::gil_scoped_release released;
    return TokenTree::branching(branches);
}

TokenTree best_for_acceptance(const std::vector<double>& acceptance, const py::object& nodes,
                              const py::object& max_levels) {
    const int64_t own_nodes = as_integer(nodes, "nodes"), most_levels = level_limit(max_levels);
    const py::gil_scoped_release released;
    return best_tree_for_acceptance(acceptance, own_nodes, most_levels);
}

Int64Array path_matrix(const TokenTree& tree) {
    Int64Array matrix({tree.num_leaves(), tree.num_levels()});
    int64_t* data = matrix.mutable_data();
    {
        const py::gil_scoped_release released;
        std::fill_n(data, tree.num_leaves() * tree.num_levels(), int64_t{-1});
        tree.write_paths(data, tree.num_levels());
    }
    return matrix;
}

py::array_t<uint8_t> ancestor_bits(const TokenTree& tree) {
    py::array_t<uint8_t> rows({tree.num_nodes(), (tree.num_nodes() + 7) / 8});
    uint8_t* data = rows.mutable_data();
    {
        const py::gil_scoped_release released;
        tree.write_ancestor_bits(data);
    }
    return rows;
}

Int64Array position_ids(const TokenTree& tree, const py::object& prefix_len) {
    const int64_t first = as_integer(prefix_len, "prefix_len");
    Int64Array positions(tree.num_nodes());
    std::transform(tree.depth().begin(), tree.depth().end(), positions.mutable_data(),
                   [first](int32_t depth) { return first + depth; });
    return positions;
}

std::unique_ptr<Guarded<TreeGrowth>> grow(const py::object& nodes, const py::object& width,
                                          const py::object& max_levels, const std::string& order) {
    if (order != "level" && order != "best") {
        fail("order", "'level' or 'best'", "'" + order + "'");
    }
    return std::make_unique<Guarded<TreeGrowth>>(
        TreeGrowth(as_integer(nodes, "nodes"), as_integer(width, "width"), level_limit(max_levels), order == "level"));
}

template <typename Element>
py::array_t<Element> padded(const std::vector<const TokenTree*>& trees, int64_t width, Element padding,
                            const std::vector<Element>& (TokenTree::*values)() const) {
    py::array_t<Element> rows({static_cast<int64_t>(trees.size()), width});
    Element* row = rows.mutable_data();
    for (const TokenTree* tree : trees) {
        const std::vector<Element>& own = (tree->*values)();
        std::fill(std::copy(own.begin(), own.end(), row), row + width, padding);
        row += width;
    }
    return rows;
}

// Trees do not change: only the list may, while the arrays are written.
py::dict batch(const std::vector<py::object>& given) {
    const Borrowed<TokenTree> borrowed(given, "trees", "a TokenTree");
    const std::vector<const TokenTree*>& trees = borrowed.pointers;
    int64_t nodes = 0, leaves = 0, levels = 0;
    const auto count = static_cast<int64_t>(trees.size());
    Int64Array num_nodes(count);
    for (int64_t index = 0; index < count; ++index) {
        if (trees[index] == nullptr) {
            fail("trees[" + std::to_string(index) + "]", "a TokenTree", "None");
        }
        num_nodes.mutable_data()[index] = trees[index]->num_nodes();
        nodes = std::max(nodes, trees[index]->num_nodes());
        leaves = std::max(leaves, trees[index]->num_leaves());
        levels = std::max(levels, trees[index]->num_levels());
    }
    Int64Array paths({count, leaves, levels});
    std::fill_n(paths.mutable_data(), paths.size(), int64_t{-1});
    for (int64_t index = 0; index < count; ++index) {
        trees[index]->write_paths(paths.mutable_data() + index * leaves * levels, levels);
    }
    py::dict arrays;
    arrays["parents"] = padded(trees, nodes, padding_parent, &TokenTree::parents);
    arrays["num_nodes"] = num_nodes;
    arrays["depth"] = padded(trees, nodes, int32_t{0}, &TokenTree::depth);
    arrays["child_ranks"] = padded(trees, nodes, int64_t{-1}, &TokenTree::child_ranks);
    arrays["first_child"] = padded(trees, nodes, int64_t{-1}, &TokenTree::first_child);
    arrays["next_sibling"] = padded(trees, nodes, int64_t{-1}, &TokenTree::next_sibling);
    arrays["path_matrix"] = paths;
    return arrays;
}

std::string summary(const TokenTree& tree) {
    return "<TokenTree: " + std::to_string(tree.num_nodes()) + " nodes, " + std::to_string(tree.num_leaves()) +
           " leaves, " + std::to_string(tree.num_levels()) + " levels>";
}

double expected_length(const TokenTree& tree, const std::vector<double>& acceptance) {
    require_acceptance(acceptance);
    return tree.expected_length(acceptance);
}

py::tuple state(const TokenTree& tree) {
    return py::make_tuple(to_array(tree.parents()), to_array(tree.child_ranks()));
}

TokenTree from_state(const py::tuple& saved) { return from_parents(saved[0], saved[1]); }

constexpr const char* tree_doc =
    R"(The draft tokens of a round, each with a parent: a chain, several chains or any tree.

Nodes are numbered from 0 and parents come before their children. Parent -1 is the root position: the last token of the
committed context, which is no node, so a node of depth 0 is a possible first draft token. Engines that count the
committed token as node 0 (SGLang, TensorRT-LLM, Medusa, EAGLE) take the arrays of `with_root()`.

TokenTree(parents, child_ranks=None)
parents: integers [nodes], each -1 or an earlier node. At most 16,384 nodes; none is an empty draft.
child_ranks: integers [nodes]: which of its parent's candidates a node is, ascending among siblings; by default the
    index among the siblings.

Every property is a new NumPy array. Trees compare by parents and ranks, pickle, and have no hash.
Raises ValueError that names the argument.)";

constexpr const char* paths_doc =
    R"(The tree of a list of paths of child ranks, as Medusa and EAGLE write their choices: [[0], [1], [0, 0]].

The order of the list is free; nodes are numbered by length of the path, then by its ranks. Raises ValueError for an empty
path, one that comes twice, one whose prefix is missing, and a negative rank.)";

constexpr const char* grow_doc =
    R"(Begin a tree that grows from draft probabilities; returns a TreeGrowth.

nodes: how many the tree may have. width: how many are expanded in one step. max_levels: longest path, in nodes.
order: "level" expands nodes of the newest level only: EAGLE-2 with width the top-k and one step a level, OPT-Tree with
    width = nodes. "best" expands the most probable nodes wherever they are, SpecExec's parallel search; it ends (with an
    empty frontier) when nothing outside the tree can be more probable than what is in it.

Sources: Li et al., "EAGLE-2", EMNLP 2024; Wang et al., "OPT-Tree", TACL 2025; Svirschevski et al., "SpecExec", NeurIPS
2024.)";

constexpr const char* acceptance_doc =
    R"(The tree of largest expected accepted length, if the child of rank r is accepted with probability acceptance[r].

acceptance: floats in [0, 1] with a sum of at most 1, the chance that the child of this rank is the accepted one once its
    parent was. nodes, max_levels: how many nodes, and nodes on a path, the tree may have. Children of a node have the
    ranks 0, 1, 2, ...; nodes that add nothing are left out.
Time grows with nodes^2 * ranks (* levels, if max_levels is given); ValueError where that exceeds 2e10.
Source: Chen et al., "Sequoia", NeurIPS 2024 (dynamic programming over tree sizes).)";

constexpr const char* batch_doc =
    R"(Different trees, padded together: a dict of NumPy arrays.

parents: int64 [batch, nodes], padded with -2, as `tree_mask` takes them. num_nodes: int64 [batch].
depth: int32 [batch, nodes], padded with 0. child_ranks, first_child, next_sibling: int64 [batch, nodes], padded with -1.
path_matrix: int64 [batch, leaves, levels], padded with -1. The sizes are the largest of the batch.)";

void bind_builders(py::class_<TokenTree>& tree) {
    tree.def_static("from_paths", &from_paths, py::arg("paths"), paths_doc)
        .def_static("chains", &chains, py::arg("count"), py::arg("length"),
                    "So many chains of so many nodes from the root position, numbered level by level.")
        .def_static(
            "branching", &branching, py::arg("branches"),
            "The tree whose nodes have branches[0] children at the root position, branches[1] on the next level, "
            "...,\nnumbered level by level.")
        .def_static("grow", &grow, py::arg("nodes"), py::arg("width"), py::kw_only(),
                    py::arg("max_levels") = py::none(), py::arg("order") = "level", grow_doc)
        .def_static("best_for_acceptance", &best_for_acceptance, py::arg("acceptance"), py::arg("nodes"),
                    py::arg("max_levels") = py::none(), acceptance_doc)
        .def_static("batch", &batch, py::arg("trees"), batch_doc)
        .def("with_root", &TokenTree::with_root, WithoutGil(),
             "The tree whose node 0 is the committed token at the root position; every other node moves up by one.\n"
             "Its prefix is one token shorter: what comes before node 0.");
}

void bind_properties(py::class_<TokenTree>& tree) {
    tree.def_property_readonly("num_nodes", &TokenTree::num_nodes)
        .def_property_readonly("num_leaves", &TokenTree::num_leaves)
        .def_property_readonly("num_levels", &TokenTree::num_levels, "Nodes on the longest path.")
        .def_property_readonly(
            "parents", [](const TokenTree& self) { return to_array(self.parents()); },
            "int64 [nodes], -1: the root position.")
        .def_property_readonly(
            "child_ranks", [](const TokenTree& self) { return to_array(self.child_ranks()); },
            "int64 [nodes]: which of its parent's candidates a node is.")
        .def_property_readonly(
            "depth", [](const TokenTree& self) { return to_array(self.depth()); }, "int32 [nodes], 0 below the root.")
        .def_property_readonly(
            "first_child", [](const TokenTree& self) { return to_array(self.first_child()); },
            "int64 [nodes], -1 at a leaf (retrieve_next_token of SGLang and TensorRT-LLM, of the tree with its root).\n"
            "The first child of the root position is node 0.")
        .def_property_readonly(
            "next_sibling", [](const TokenTree& self) { return to_array(self.next_sibling()); },
            "int64 [nodes], -1 at the last child of a node (retrieve_next_sibling).")
        .def_property_readonly(
            "path_matrix", &path_matrix,
            "int64 [leaves, levels]: the nodes on the way to each leaf, then -1; leaves in their order\n"
            "(retrieve_indices of Medusa and EAGLE, of the tree with its root).")
        .def_property_readonly(
            "ancestor_bits", &ancestor_bits,
            "uint8 [nodes, ceil(nodes / 8)]: bit j % 8 of byte j / 8 says that node j is the row's node\n"
            "or an ancestor of it (`tree_mask` with layout \"packed\").")
        .def(
            "children",
            [](const TokenTree& self, const py::object& node) {
                return to_array(self.children(as_integer(node, "node")));
            },
            py::arg("node"), "int64 [children] of a node, or of the root position, -1.")
        .def("position_ids", &position_ids, py::arg("prefix_len"),
             "int64 [nodes]: the absolute positions after a prefix of so many tokens, prefix_len + depth.")
        .def("expected_length", &expected_length, py::arg("acceptance"), WithoutGil(),
             "The expected number of accepted nodes, if the child of rank r is accepted with probability "
             "acceptance[r]:\n"
             "the sum over all nodes of the product along their paths. acceptance as in `best_for_acceptance`.");
}

}  // namespace

void bind_token_tree(py::module_& module) {
    py::class_<TokenTree> tree(module, "TokenTree", tree_doc);
    bind_tree_growth(module);
    tree.attr("__module__") = "specens_kernels";
    tree.def(py::init(&from_parents), py::arg("parents"), py::arg("child_ranks") = py::none())
        .def(py::self == py::self)
        .def("__len__", &TokenTree::num_nodes)
        .def("__repr__", &summary)
        .def(py::pickle(&state, &from_state));
    bind_properties(tree);
    bind_builders(tree);
}

}  // namespace specens
