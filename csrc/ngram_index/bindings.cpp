// NgramIndex for Python.
#include "ngram_index/bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>

#include "bindings/arrays.h"
#include "bindings/guarded.h"
#include "ngram_index/index.h"

namespace specens {
namespace {

namespace py = pybind11;

using Index = Guarded<NgramIndex>;
using Tokens = std::vector<int64_t>;

constexpr int64_t max_token = std::numeric_limits<int32_t>::max();
constexpr int64_t max_draft_len = 65536;

// What the drafts of a call have in common.
struct Drafting {
    int64_t draft_len, min_match;
    bool frequent;
};

struct Proposal {
    std::vector<int64_t> tokens;
    int64_t match_len = 0;
};

Tokens checked_tokens(const py::object& values, const std::string& argument) {
    Tokens tokens = to_vector(as_array<int64_t>(values, argument.c_str(), 1, "iu", "integers of shape [tokens]"));
    for (size_t index = 0; index < tokens.size(); ++index) {
        if (tokens[index] < 0 || tokens[index] > max_token) {
            fail(argument + "[" + std::to_string(index) + "]", "an id from 0 to " + std::to_string(max_token),
                 std::to_string(tokens[index]));
        }
    }
    return tokens;
}

Drafting checked_drafting(const py::object& draft_len, const py::object& min_match, const std::string& choose,
                          const char* argument = "draft_len") {
    const int64_t most = as_integer(draft_len, argument, 0, max_draft_len),
                  least = as_integer(min_match, "min_match", 1);
    if (choose != "recent" && choose != "frequent") {
        fail("choose", "'recent' or 'frequent'", "'" + choose + "'");
    }
    return {most, least, choose == "frequent"};
}

void add(NgramIndex& index, const Tokens& tokens) {
    const auto count = static_cast<int64_t>(tokens.size());
    if (index.num_tokens() + index.num_texts() + count > max_index_tokens) {
        fail("tokens", "at most " + std::to_string(max_index_tokens) + " in all",
             std::to_string(index.num_tokens() + count));
    }
    index.extend(tokens.data(), count);
}

void extend(Index& index, const py::object& values) {
    const Tokens tokens = checked_tokens(values, "tokens");
    index.change([&](NgramIndex& own) { add(own, tokens); });
}

std::unique_ptr<Index> from_tokens(const py::object& values, const py::object& max_match) {
    const auto longest = static_cast<int32_t>(as_integer(max_match, "max_match", 1, max_index_tokens));
    const Tokens tokens = checked_tokens(values, "tokens");
    const py::gil_scoped_release released;
    NgramIndex index(longest);
    add(index, tokens);
    return std::make_unique<Index>(std::move(index));
}

NgramIndex::Match match_after(const NgramIndex& index, NgramIndex::Match from, const Tokens& more) {
    const auto count = static_cast<int64_t>(more.size());
    const int64_t looked_at = std::min<int64_t>(count, index.max_match());  // earlier tokens change nothing
    const NgramIndex::Match start = looked_at < count ? NgramIndex::Match{} : from;
    return index.after(start, more.data() + count - looked_at, looked_at);
}

Proposal propose(const NgramIndex& index, NgramIndex::Match from, const Tokens& more, const Drafting& drafting) {
    const NgramIndex::Match match = match_after(index, from, more);
    Proposal proposal;
    proposal.tokens.resize(drafting.draft_len);
    proposal.tokens.resize(index.propose(match, drafting.draft_len, drafting.min_match, drafting.frequent,
                                         proposal.tokens.data(), &proposal.match_len));
    return proposal;
}

py::tuple as_tuple(const Proposal& proposal) { return py::make_tuple(to_array(proposal.tokens), proposal.match_len); }

py::tuple propose_after_text(const Index& index, const py::object& draft_len, const py::object& tail,
                             const py::object& min_match, const std::string& choose) {
    const Drafting drafting = checked_drafting(draft_len, min_match, choose);
    const Tokens more = checked_tokens(tail, "tail");
    return as_tuple(index.read([&](const NgramIndex& own) { return propose(own, own.end(), more, drafting); }));
}

py::tuple propose_after_context(const Index& index, const py::object& context, const py::object& draft_len,
                                const py::object& min_match, const std::string& choose) {
    const Drafting drafting = checked_drafting(draft_len, min_match, choose);
    const Tokens more = checked_tokens(context, "context");
    return as_tuple(index.read([&](const NgramIndex& own) { return propose(own, {}, more, drafting); }));
}

py::tuple propose_tree(const Index& index, const py::object& nodes, const py::object& max_levels,
                       const py::object& tail, const py::object& context, const py::object& min_match) {
    const Drafting drafting = checked_drafting(nodes, min_match, "frequent", "nodes");
    const int64_t levels = max_levels.is_none() ? drafting.draft_len : as_integer(max_levels, "max_levels", 0);
    const Tokens more = context.is_none() ? checked_tokens(tail, "tail") : checked_tokens(context, "context");
    if (!context.is_none() && !checked_tokens(tail, "tail").empty()) {
        fail("tail", "none beside a context", "both");
    }
    const NgramIndex::Tree tree = index.read([&](const NgramIndex& own) {
        const NgramIndex::Match from = context.is_none() ? own.end() : NgramIndex::Match{};
        return own.propose_tree(match_after(own, from, more), drafting.draft_len, levels, drafting.min_match);
    });
    return py::make_tuple(to_array(tree.parents), to_array(tree.tokens), to_array(tree.probabilities), tree.match_len);
}

// The last tokens of the open text, as many as an n-gram may have, and the tail.
Tokens store_context(const NgramIndex& own, const Tokens& tail, int64_t max_match) {
    const std::vector<int32_t>& text = own.tokens();
    const auto most = std::min<int64_t>(max_match, static_cast<int64_t>(text.size()));
    int64_t before = 0;
    while (before < most && text[text.size() - 1 - before] != NgramIndex::separator) {
        ++before;
    }
    Tokens context(text.end() - before, text.end());
    context.insert(context.end(), tail.begin(), tail.end());
    return context;
}

// Without the GIL. One index is looked at after the other, so that no thread waits for one while it keeps another.
Proposal propose_for(const Index* own, const Index* store, const Tokens& tail, const Drafting& drafting) {
    Proposal best;
    Tokens context = tail;
    if (own != nullptr) {
        const int64_t max_match =
            store == nullptr ? 0 : store->read_without_gil([](const NgramIndex& index) { return index.max_match(); });
        own->read_without_gil([&](const NgramIndex& index) {
            best = propose(index, index.end(), tail, drafting);
            context = store_context(index, tail, max_match);
        });
    }
    if (store != nullptr) {
        Proposal stored =
            store->read_without_gil([&](const NgramIndex& index) { return propose(index, {}, context, drafting); });
        if (stored.match_len > best.match_len) {
            best = std::move(stored);
        }
    }
    return best;
}

py::tuple propose_batch(const std::vector<py::object>& given, const py::object& draft_len,
                        const std::optional<std::vector<py::object>>& tails, const Index* store,
                        const py::object& min_match, const std::string& choose) {
    const Drafting drafting = checked_drafting(draft_len, min_match, choose);
    const Borrowed<Index> indices(given, "indices", "an NgramIndex or None");
    const auto batch = static_cast<int64_t>(given.size());
    if (tails && static_cast<int64_t>(tails->size()) != batch) {
        fail("tails", "one for each of " + std::to_string(batch) + " indices", std::to_string(tails->size()));
    }
    std::vector<Tokens> more(batch);
    for (int64_t index = 0; tails && index < batch; ++index) {
        more[index] = checked_tokens((*tails)[index], "tails[" + std::to_string(index) + "]");
    }
    std::vector<Proposal> proposals(batch);
    {
        const py::gil_scoped_release released;
        for (int64_t index = 0; index < batch; ++index) {
            proposals[index] = propose_for(indices.pointers[index], store, more[index], drafting);
        }
    }
    py::array_t<int64_t> tokens({batch, drafting.draft_len}), draft_lens(batch), match_lens(batch);
    std::fill_n(tokens.mutable_data(), tokens.size(), int64_t{-1});
    for (int64_t index = 0; index < batch; ++index) {
        const Proposal& proposal = proposals[index];
        std::copy(proposal.tokens.begin(), proposal.tokens.end(), tokens.mutable_data() + index * drafting.draft_len);
        draft_lens.mutable_data()[index] = static_cast<int64_t>(proposal.tokens.size());
        match_lens.mutable_data()[index] = proposal.match_len;
    }
    return py::make_tuple(tokens, draft_lens, match_lens);
}

// A function of an index that tells a number.
template <auto number>
int64_t told(const Index& index) {
    return index.read([](const NgramIndex& own) { return static_cast<int64_t>((own.*number)()); });
}

std::string summary(const Index& index) {
    return index.read([](const NgramIndex& own) {
        return "<NgramIndex: " + std::to_string(own.num_tokens()) + " tokens, " + std::to_string(own.num_texts()) +
               " texts, max_match " + std::to_string(own.max_match()) + ">";
    });
}

py::tuple state(const Index& index) {
    return py::make_tuple(to_array(index.read([](const NgramIndex& own) { return own.tokens(); })),
                          told<&NgramIndex::max_match>(index));
}

std::unique_ptr<Index> from_state(const py::tuple& saved) {
    const Tokens tokens = to_vector(saved[0].cast<py::array_t<int64_t, py::array::c_style | py::array::forcecast>>());
    const auto max_match = saved[1].cast<int32_t>();
    const py::gil_scoped_release released;
    NgramIndex index(max_match);
    for (const int64_t& token : tokens) {
        if (token == NgramIndex::separator) {
            index.begin_text();
        } else {
            index.extend(&token, 1);
        }
    }
    return std::make_unique<Index>(std::move(index));
}

constexpr const char* index_doc =
    R"(An index of what followed each n-gram, which drafts tokens without a model.

Over a request's own tokens it is prompt lookup: extend it by what was settled, and propose what followed the longest
n-gram that the text ends with. Over other texts it is a datastore that many requests share.

NgramIndex(tokens=(), *, max_match=32)
tokens: integers [tokens], the beginning of the first text; ids from 0 to 2,147,483,647.
max_match: the longest n-gram that is looked at. Longer ones are more often right and cost time where texts repeat
    themselves: adding a token takes a step for each of its repeated n-grams that has followers of its own, a few in
    natural text, at most max_match.

A draft token is the one that followed the longest n-gram which the context, with the draft so far, ends with, and which
some token followed in the same text. So a draft goes on where a text ends or repeats itself.

Proposing takes time for the draft and the tail only, about a microsecond; adding a token about two. Memory: 90 to 220 bytes
a token, 256 at most, the fewer the less its arrays, which double, have room; `nbytes` tells. An index pickles as its texts,
and is built anew from them.
The drafts are chosen, not drawn: `verify_chain` gets no draft distribution for them. Raises ValueError that names the
argument.
Sources: Saxena, "Prompt Lookup Decoding", 2023; He et al., "REST: Retrieval-Based Speculative Decoding", NAACL 2024; Hu et
al., "SAM Decoding: Speculative Decoding via Suffix Automaton", 2024.)";

constexpr const char* propose_doc =
    R"(Return (tokens, match_len): int64 [at most draft_len], and the length of the n-gram that the first one followed.

draft_len: 0 to 65,536. tail: integers, tokens after the open text that are not settled yet; the index stays as it is.
min_match: a shorter n-gram proposes nothing. 0 tokens and match_len 0 where none is found.
choose: "recent": what followed the n-gram last; "frequent": what followed it most often, the latest on a tie.)";

constexpr const char* after_doc =
    R"(As `propose`, after a context of the caller's instead of the open text: a datastore that requests share.

context: integers [tokens]; its last max_match tokens decide.)";

constexpr const char* tree_doc =
    R"(What may follow the open text, as a draft tree: (parents, tokens, probabilities, match_len).

Node after node the most probable continuation is taken, a parent before its children: a token's probability is how often it
followed the longest n-gram which the ones before it end with, among all that followed that; a node's is the product along
its path. Nodes that are left over go to what followed shorter n-grams of the text's end.

nodes: 0 to 65,536, at most so many. max_levels: nodes on a path; None: as many as there are. tail: as in `propose`.
context: integers [tokens] in place of the open text, as in `propose_after`. min_match: a shorter n-gram proposes nothing.

parents, tokens: int64 [nodes], -1 below the text, as `TokenTree` takes them. probabilities: float64 [nodes]. match_len: the
length of the longest n-gram that the first nodes followed.
Source: He et al., "REST: Retrieval-Based Speculative Decoding", NAACL 2024 (a trie of the retrieved continuations).)";

constexpr const char* batch_doc =
    R"(Drafts of a batch, as `verify_chain` takes them: (draft_tokens, draft_lens, match_lens).

indices: an NgramIndex a request, or None for one without. tails: integers a request, as in `propose`, or None.
store: an index that all requests share; where it knows a longer n-gram than the request's own index, it drafts. A
    request's context is its own open text and its tail.
draft_len, min_match, choose: as in `propose`.

draft_tokens: int64 [batch, draft_len], padded with -1. draft_lens, match_lens: int64 [batch].)";

constexpr const char* recent = "recent";

void bind_proposals(py::class_<Index>& index) {
    index
        .def("propose", &propose_after_text, py::arg("draft_len"), py::arg("tail") = py::tuple(), py::kw_only(),
             py::arg("min_match") = 1, py::arg("choose") = recent, propose_doc)
        .def("propose_after", &propose_after_context, py::arg("context"), py::arg("draft_len"), py::kw_only(),
             py::arg("min_match") = 1, py::arg("choose") = recent, after_doc)
        .def("propose_tree", &propose_tree, py::arg("nodes"), py::kw_only(), py::arg("max_levels") = py::none(),
             py::arg("tail") = py::tuple(), py::arg("context") = py::none(), py::arg("min_match") = 1, tree_doc)
        .def_static("propose_batch", &propose_batch, py::arg("indices"), py::arg("draft_len"), py::kw_only(),
                    py::arg("tails") = py::none(), py::arg("store") = py::none(), py::arg("min_match") = 1,
                    py::arg("choose") = recent, batch_doc);
}

}  // namespace

void bind_ngram_index(py::module_& module) {
    py::class_<Index> index(module, "NgramIndex", index_doc);
    index.attr("__module__") = "specens_kernels";
    index.def(py::init(&from_tokens), py::arg("tokens") = py::tuple(), py::kw_only(), py::arg("max_match") = 32)
        .def("extend", &extend, py::arg("tokens"),
             "Add tokens to the open text: integers [tokens]. All or, where one is wrong, none.")
        .def(
            "begin_text", [](Index& self) { self.change([](NgramIndex& own) { own.begin_text(); }); },
            "Close the open text and begin another: no n-gram and no draft runs from one to the next.")
        .def_property_readonly("num_texts", &told<&NgramIndex::num_texts>, "How many texts have tokens.")
        .def_property_readonly("max_match", &told<&NgramIndex::max_match>)
        .def_property_readonly("nbytes", &told<&NgramIndex::num_bytes>, "Bytes of memory that the index holds.")
        .def("__len__", &told<&NgramIndex::num_tokens>)
        .def("__repr__", &summary)
        .def(py::pickle(&state, &from_state));
    bind_proposals(index);
}

}  // namespace specens
