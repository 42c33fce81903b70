// What followed each n-gram of a collection of texts, kept as the texts grow: a suffix automaton over tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace specens {

constexpr int64_t max_index_tokens = int64_t{1} << 29;  // at most 2 states and 3 edges a token

class NgramIndex {
  public:
    // The longest n-gram that the tokens before a index end with: `length` tokens, and the state that holds it.
    struct Match {
        int32_t state = 0, length = 0;
    };

    explicit NgramIndex(int32_t max_match);

    // Ids are not negative; in all at most max_index_tokens.
    void extend(const int64_t* tokens, int64_t count);
    // What follows is another text: no n-gram and no draft runs from one to the next.
    void begin_text();

    // What may follow a place, as a tree: node after node the most probable one, a parent before its children.
    struct Tree {
        std::vector<int64_t> parents, tokens;
        std::vector<double> probabilities;  // of the paths
        int64_t match_len = 0;
    };

    // Of the text that is open.
    Match end() const { return end_; }
    Match after(Match match, const int64_t* tokens, int64_t count) const;
    // Write at most draft_len tokens; each is what followed the longest n-gram, of min_match tokens or more, that the
    // ones before it end with: last, or most often. Return their number, and the length of the first n-gram.
    int64_t propose(Match match, int64_t draft_len, int64_t min_match, bool frequent, int64_t* draft,
                    int64_t* match_len) const;

    // At most `nodes` in `max_levels`. A token's probability is how often it followed the longest n-gram, of min_match
    // tokens or more, that the ones before it end with, by how often anything did; nodes that are left over go to what
    // followed shorter n-grams.
    Tree propose_tree(Match match, int64_t nodes, int64_t max_levels, int64_t min_match) const;

    int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size()) - num_texts_ + (text_is_open() ? 1 : 0); }
    int64_t num_texts() const { return num_texts_; }
    int32_t max_match() const { return max_match_; }
    int64_t num_bytes() const;
    // All texts, each but the first after a separator.
    const std::vector<int32_t>& tokens() const { return tokens_; }

    static constexpr int32_t separator = -1;

  private:
    static constexpr int32_t none = -1;

    struct State {
        int32_t length;           // of its longest n-gram
        int32_t link = none;      // the state of the longest suffix that occurs elsewhere too
        int32_t follower = none;  // the index of the token that followed last; for n-grams up to max_match
        int32_t first_edge = none, likely_edge = none;
    };
    struct Edge {
        int32_t state, token, target, next;
        int32_t count;  // how often the token followed; for n-grams up to max_match
    };

    // Whether the open text has tokens.
    bool text_is_open() const { return !tokens_.empty() && tokens_.back() != separator; }
    void add(int32_t token);
    int32_t state_after(int32_t token);
    int32_t split(int32_t before, int32_t whole, int32_t token);
    void note_follower(int32_t state, int32_t token, int32_t index);
    Match settle(Match match) const;
    bool back_off(Match& match, int64_t min_match) const;
    Match step(Match match, int32_t token) const;

    int32_t find_edge(int32_t state, int32_t token) const;
    int32_t add_edge(int32_t state, int32_t token, int32_t target, int32_t count);
    void put_in_table(int32_t edge);
    size_t slot_of(int32_t state, int32_t token) const;

    int32_t max_match_;
    int64_t num_texts_ = 0;
    std::vector<int32_t> tokens_;
    std::vector<State> states_ = {State{0}};  // the first holds the n-gram of no token
    std::vector<Edge> edges_;
    std::vector<int32_t> table_;  // edges by state and token, open addressing; a power of two
    int32_t last_ = 0;            // holds the whole text that is open
    Match end_;
};

}  // namespace specens
