#include "ngram_index/index.h"

#include <algorithm>
#include <queue>

namespace specens {
namespace {

constexpr size_t least_table = 16;

template <typename Element>
int64_t bytes_of(const std::vector<Element>& values) {
    return static_cast<int64_t>(values.capacity() * sizeof(Element));
}

}  // namespace

NgramIndex::NgramIndex(int32_t max_match) : max_match_(max_match), table_(least_table, none) {}

void NgramIndex::extend(const int64_t* tokens, int64_t count) {
    for (int64_t index = 0; index < count; ++index) {
        add(static_cast<int32_t>(tokens[index]));
    }
}

void NgramIndex::begin_text() {
    if (text_is_open()) {
        tokens_.push_back(separator);
    }
    last_ = 0;
    end_ = {};
}

// The n-grams that end before the token, up to max_match of them, each get to know their follower.
void NgramIndex::add(int32_t token) {
    if (!text_is_open()) {
        ++num_texts_;
    }
    const auto index = static_cast<int32_t>(tokens_.size());
    tokens_.push_back(token);
    last_ = state_after(token);
    end_ = settle(end_);
    for (int32_t state = end_.state; state != 0; state = states_[state].link) {
        note_follower(state, token, index);
    }
    end_ = step(end_, token);
}

// The state of the open text with one more token. Blumer et al., "The smallest automaton recognizing the subwords of a
// text", 1985; the first case is that of texts that begin like an earlier one.
int32_t NgramIndex::state_after(int32_t token) {
    const int32_t known = find_edge(last_, token);
    if (known != none) {
        const int32_t target = edges_[known].target;
        return states_[target].length == states_[last_].length + 1 ? target : split(last_, target, token);
    }
    const auto whole = static_cast<int32_t>(states_.size());
    states_.push_back({states_[last_].length + 1});
    int32_t before = last_;
    int32_t edge = none;
    while (before != none && (edge = find_edge(before, token)) == none) {
        add_edge(before, token, whole, 0);
        before = states_[before].link;
    }
    int32_t link = 0;
    if (before != none) {
        link = edges_[edge].target;
        if (states_[link].length != states_[before].length + 1) {
            link = split(before, link, token);
        }
    }
    states_[whole].link = link;
    return whole;
}

// A state of its own for those n-grams of `whole` that now occur elsewhere too: the longest of `before`, and the token.
int32_t NgramIndex::split(int32_t before, int32_t whole, int32_t token) {
    const auto part = static_cast<int32_t>(states_.size());
    states_.push_back({states_[before].length + 1, states_[whole].link, states_[whole].follower});
    for (int32_t edge = states_[whole].first_edge; edge != none; edge = edges_[edge].next) {
        const int32_t copy = add_edge(part, edges_[edge].token, edges_[edge].target, edges_[edge].count);
        if (edge == states_[whole].likely_edge) {
            states_[part].likely_edge = copy;
        }
    }
    states_[whole].link = part;
    for (int32_t state = before; state != none; state = states_[state].link) {
        const int32_t edge = find_edge(state, token);
        if (edge == none || edges_[edge].target != whole) {
            break;
        }
        edges_[edge].target = part;
    }
    return part;
}

void NgramIndex::note_follower(int32_t state, int32_t token, int32_t index) {
    State& own = states_[state];
    const int32_t edge = find_edge(state, token);
    own.follower = index;
    ++edges_[edge].count;
    if (own.likely_edge == none || edges_[edge].count >= edges_[own.likely_edge].count) {
        own.likely_edge = edge;
    }
}

// The state that holds an n-gram so short: states may have been split, and `max_match` cuts.
NgramIndex::Match NgramIndex::settle(Match match) const {
    while (match.state != 0 && states_[states_[match.state].link].length >= match.length) {
        match.state = states_[match.state].link;
    }
    return match;
}

NgramIndex::Match NgramIndex::step(Match match, int32_t token) const {
    int32_t edge = find_edge(match.state, token);
    while (edge == none && match.state != 0) {
        match.state = states_[match.state].link;
        match.length = states_[match.state].length;
        edge = find_edge(match.state, token);
    }
    if (edge == none) {
        return {};
    }
    return settle({edges_[edge].target, std::min(match.length + 1, max_match_)});
}

NgramIndex::Match NgramIndex::after(Match match, const int64_t* tokens, int64_t count) const {
    for (int64_t index = 0; index < count; ++index) {
        match = step(match, static_cast<int32_t>(tokens[index]));
    }
    return match;
}

int64_t NgramIndex::propose(Match match, int64_t draft_len, int64_t min_match, bool frequent, int64_t* draft,
                            int64_t* match_len) const {
    *match_len = 0;
    for (int64_t count = 0; count < draft_len; ++count) {
        if (!back_off(match, min_match)) {
            return count;
        }
        if (count == 0) {
            *match_len = match.length;
        }
        const State& state = states_[match.state];
        const int32_t token = frequent ? edges_[state.likely_edge].token : tokens_[state.follower];
        draft[count] = token;
        match = step(match, token);
    }
    return draft_len;
}

// Go to the longest suffix of an n-gram that something followed; whether there is one so long.
bool NgramIndex::back_off(Match& match, int64_t min_match) const {
    while (match.length >= min_match && states_[match.state].follower == none) {
        match.state = states_[match.state].link;
        match.length = states_[match.state].length;
    }
    return match.length >= min_match;
}

NgramIndex::Tree NgramIndex::propose_tree(Match match, int64_t nodes, int64_t max_levels, int64_t min_match) const {
    struct Candidate {
        double probability;
        int64_t parent, level;
        int32_t token;
        Match after;
        int64_t number;  // the earlier candidate first, on a tie

        bool operator<(const Candidate& other) const {
            return probability != other.probability ? probability < other.probability : number > other.number;
        }
    };
    Tree tree;
    std::priority_queue<Candidate> candidates;
    std::vector<int64_t> known;  // tokens below the text
    int64_t number = 0;
    const auto add_children = [&](Match from, int64_t parent, int64_t level, double probability) {
        int64_t total = 0;
        for (int32_t edge = states_[from.state].first_edge; edge != none; edge = edges_[edge].next) {
            total += edges_[edge].count;
        }
        for (int32_t edge = states_[from.state].first_edge; edge != none; edge = edges_[edge].next) {
            const int32_t token = edges_[edge].token;
            const bool twice = parent < 0 && std::find(known.begin(), known.end(), token) != known.end();
            if (edges_[edge].count > 0 && !twice) {
                const double share = static_cast<double>(edges_[edge].count) / static_cast<double>(total);
                candidates.push({probability * share, parent, level, token, step(from, token), number++});
            }
        }
    };
    while (max_levels > 0 && static_cast<int64_t>(tree.tokens.size()) < nodes && back_off(match, min_match)) {
        tree.match_len = std::max<int64_t>(tree.match_len, match.length);
        add_children(match, -1, 0, 1.0);
        while (!candidates.empty() && static_cast<int64_t>(tree.tokens.size()) < nodes) {
            Candidate best = candidates.top();
            candidates.pop();
            const auto node = static_cast<int64_t>(tree.tokens.size());
            tree.parents.push_back(best.parent);
            tree.tokens.push_back(best.token);
            tree.probabilities.push_back(best.probability);
            if (best.parent < 0) {
                known.push_back(best.token);
            }
            if (best.level + 1 < max_levels && back_off(best.after, min_match)) {
                add_children(best.after, node, best.level + 1, best.probability);
            }
        }
        match.state = states_[match.state].link;
        match.length = match.state == none ? 0 : states_[match.state].length;
    }
    return tree;
}

int64_t NgramIndex::num_bytes() const {
    return bytes_of(tokens_) + bytes_of(states_) + bytes_of(edges_) + bytes_of(table_);
}

size_t NgramIndex::slot_of(int32_t state, int32_t token) const {
    const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32 | static_cast<uint32_t>(token);
    const uint64_t mixed = (key ^ key >> 29) * 0x9E3779B97F4A7C15u;
    return (mixed >> 20) & (table_.size() - 1);
}

int32_t NgramIndex::find_edge(int32_t state, int32_t token) const {
    for (size_t slot = slot_of(state, token);; slot = (slot + 1) & (table_.size() - 1)) {
        const int32_t edge = table_[slot];
        if (edge == none || (edges_[edge].state == state && edges_[edge].token == token)) {
            return edge;
        }
    }
}

int32_t NgramIndex::add_edge(int32_t state, int32_t token, int32_t target, int32_t count) {
    const auto edge = static_cast<int32_t>(edges_.size());
    edges_.push_back({state, token, target, states_[state].first_edge, count});
    states_[state].first_edge = edge;
    if (2 * edges_.size() > table_.size()) {
        table_.assign(2 * table_.size(), none);
        for (int32_t known = 0; known < edge; ++known) {
            put_in_table(known);
        }
    }
    put_in_table(edge);
    return edge;
}

void NgramIndex::put_in_table(int32_t edge) {
    size_t slot = slot_of(edges_[edge].state, edges_[edge].token);
    while (table_[slot] != none) {
        slot = (slot + 1) & (table_.size() - 1);
    }
    table_[slot] = edge;
}

}  // namespace specens
