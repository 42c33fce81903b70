// Draft trees and n-gram indices of specens.h.
#include <algorithm>
#include <limits>
#include <vector>

#include "api/guarded.h"
#include "ngram_index/index.h"
#include "parts/integers.h"
#include "token_tree/acceptance.h"
#include "token_tree/growth.h"

using namespace specens;

struct specens_growth {
    TreeGrowth growth;
};

struct specens_ngram_index {
    NgramIndex index;
};

namespace {

constexpr int64_t most_tokens_drafted = 65536;

int64_t levels_of(int64_t max_levels) { return max_levels == 0 ? std::numeric_limits<int64_t>::max() : max_levels; }

template <typename Element>
void copy_to(const std::vector<Element>& values, Element* out) {
    if (out != nullptr) {
        std::copy(values.begin(), values.end(), out);
    }
}

// A copy.
std::vector<int64_t> integers(const char* name, const specens_tensor* tensor, std::initializer_list<int64_t> sizes) {
    require(tensor != nullptr, "tokens, parents: expected integers, got NULL");
    const IntegerTable table(name, tensor, sizes);
    std::vector<int64_t> copy;
    copy.reserve(count_elements(*tensor));
    for (int64_t row = 0; row < (tensor->ndim == 2 ? size(*tensor, 0) : 1); ++row) {
        for (int64_t column = 0; column < table.columns; ++column) {
            copy.push_back(table(row, column));
        }
    }
    return copy;
}

std::vector<int64_t> token_ids(const specens_tensor* tensor) {
    const std::vector<int64_t> tokens = integers("tokens", tensor, {any_size});
    const auto wrong = [](int64_t id) { return id < 0 || id > std::numeric_limits<int32_t>::max(); };
    const auto found = std::find_if(tokens.begin(), tokens.end(), wrong);
    if (found != tokens.end()) {
        fail("tokens", "ids from 0 to 2147483647", std::to_string(*found));
    }
    return tokens;
}

// A copy.
std::vector<double> probabilities_of(const specens_tensor* tensor, int64_t rows, int64_t columns) {
    require(tensor != nullptr, "probabilities: expected float32 or float64, got NULL");
    require_dtype("probabilities", *tensor, {SPECENS_FLOAT32, SPECENS_FLOAT64}, "float32 or float64");
    require_shape("probabilities", *tensor, {rows, columns});
    std::vector<double> copy;
    copy.reserve(rows * columns);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
            const int64_t index = row * stride(*tensor, 0) + column * stride(*tensor, 1);
            copy.push_back(tensor->dtype == SPECENS_FLOAT64 ? data_of<double>(*tensor)[index]
                                                            : data_of<float>(*tensor)[index]);
        }
    }
    return copy;
}

}  // namespace

int32_t specens_tree_links(const specens_tensor* parents, int32_t* depth, int64_t* first_child, int64_t* next_sibling,
                           int64_t* num_levels) {
    return guarded([&] {
        std::vector<int64_t> links = integers("parents", parents, {any_size});
        require_node_count("parents", static_cast<int64_t>(links.size()));
        const TokenTree tree(std::move(links));
        copy_to(tree.depth(), depth);
        copy_to(tree.first_child(), first_child);
        copy_to(tree.next_sibling(), next_sibling);
        if (num_levels != nullptr) {
            *num_levels = tree.num_levels();
        }
    });
}

int32_t specens_best_tree(const double* acceptance, int64_t ranks, int64_t nodes, int64_t max_levels, int64_t* parents,
                          int64_t* child_ranks, int64_t* num_nodes) {
    return guarded([&] {
        require(ranks >= 0 && (ranks == 0 || acceptance != nullptr), "acceptance: expected probabilities, got NULL");
        require(parents != nullptr && num_nodes != nullptr, "parents, num_nodes: expected buffers, got NULL");
        const std::vector<double> chances(acceptance, acceptance + ranks);
        const TokenTree tree = best_tree_for_acceptance(chances, nodes, levels_of(max_levels));
        copy_to(tree.parents(), parents);
        copy_to(tree.child_ranks(), child_ranks);
        *num_nodes = tree.num_nodes();
    });
}

int32_t specens_growth_create(int64_t nodes, int64_t width, int64_t max_levels, int32_t newest_only,
                              specens_growth** growth) {
    return guarded([&] {
        require(growth != nullptr, "growth: expected a pointer to one, got NULL");
        *growth = new specens_growth{TreeGrowth(nodes, width, levels_of(max_levels), newest_only != 0)};
    });
}

void specens_growth_destroy(specens_growth* growth) { delete growth; }

const int64_t* specens_growth_frontier(const specens_growth* growth, int64_t* count) {
    *count = static_cast<int64_t>(growth->growth.frontier().size());
    return growth->growth.frontier().data();
}

int32_t specens_growth_add(specens_growth* growth, const specens_tensor* tokens, const specens_tensor* probabilities) {
    return guarded([&] {
        require(growth != nullptr, "growth: expected one, got NULL");
        const auto rows = static_cast<int64_t>(growth->growth.frontier().size());
        const std::vector<int64_t> ids = integers("tokens", tokens, {rows, any_size});
        const int64_t columns = size(*tokens, 1);
        const std::vector<double> chances = probabilities_of(probabilities, rows, columns);
        growth->growth.add(ids.data(), chances.data(), columns);
    });
}

int32_t specens_growth_prune(const specens_growth* growth, int64_t* parents, int64_t* tokens, int64_t* candidates,
                             int64_t* num_nodes) {
    return guarded([&] {
        require(growth != nullptr && num_nodes != nullptr, "growth, num_nodes: expected both, got NULL");
        const TreeGrowth::Pruned pruned = growth->growth.prune();
        copy_to(pruned.tree.parents(), parents);
        copy_to(pruned.tokens, tokens);
        copy_to(pruned.candidates, candidates);
        *num_nodes = pruned.tree.num_nodes();
    });
}

int32_t specens_ngram_index_create(int64_t max_match, specens_ngram_index** index) {
    return guarded([&] {
        require(index != nullptr, "index: expected a pointer to one, got NULL");
        if (max_match < 1 || max_match > max_index_tokens) {
            fail("max_match", "1 to " + std::to_string(max_index_tokens), std::to_string(max_match));
        }
        *index = new specens_ngram_index{NgramIndex(static_cast<int32_t>(max_match))};
    });
}

void specens_ngram_index_destroy(specens_ngram_index* index) { delete index; }

int32_t specens_ngram_index_extend(specens_ngram_index* index, const specens_tensor* tokens) {
    return guarded([&] {
        require(index != nullptr, "index: expected one, got NULL");
        const std::vector<int64_t> ids = token_ids(tokens);
        const auto count = static_cast<int64_t>(ids.size());
        NgramIndex& own = index->index;
        if (own.num_tokens() + own.num_texts() + count > max_index_tokens) {
            fail("tokens", "at most " + std::to_string(max_index_tokens) + " in all",
                 std::to_string(own.num_tokens() + count));
        }
        own.extend(ids.data(), count);
    });
}

int32_t specens_ngram_index_begin_text(specens_ngram_index* index) {
    return guarded([&] {
        require(index != nullptr, "index: expected one, got NULL");
        index->index.begin_text();
    });
}

int32_t specens_ngram_index_propose(const specens_ngram_index* index, int64_t draft_len, int64_t min_match,
                                    int32_t most_frequent, int64_t* tokens, int64_t* num_tokens, int64_t* match_len) {
    return guarded([&] {
        require(index != nullptr && tokens != nullptr && num_tokens != nullptr,
                "index, tokens, num_tokens: expected all of them, got NULL");
        if (draft_len < 0 || draft_len > most_tokens_drafted) {
            fail("draft_len", "0 to " + std::to_string(most_tokens_drafted), std::to_string(draft_len));
        }
        if (min_match < 1) {
            fail("min_match", "1 or more", std::to_string(min_match));
        }
        int64_t matched = 0;
        const NgramIndex& own = index->index;
        *num_tokens = own.propose(own.end(), draft_len, min_match, most_frequent != 0, tokens, &matched);
        if (match_len != nullptr) {
            *match_len = matched;
        }
    });
}
