// Chains and trees of whose rows this is a slice of the vocabulary: numbers that are summed, and compared, elsewhere.
#pragma once

#include <limits>
#include <vector>

#include "parts/parallel.h"
#include "parts/path_edits.h"
#include "sample/best_list.h"
#include "sample/block_race.h"
#include "sample/exact_logits.h"
#include "verify_chain/arguments.h"

namespace specens {

// Rows of which nothing is filtered before others have said what is kept. A row's parts: those of the target, then what
// the draft of its index was drawn from, in a tree at another row.
struct ShardRows {
    TargetArguments target;
    DraftArguments draft;  // tokens as the slice counts them, outside of it where they lie elsewhere
    IntegerTable parents;  // [batch, draft_len] of a tree, as `TreeArgument` has them, -2 for padding
    int64_t parts, tiles;

    ShardRows(const specens_target* given, const specens_draft& drafts, const Tensor* parents_given)
        : target(given),
          draft(target, &drafts, parents_given != nullptr ? 1 : 0),
          parents("parents", parents_given, {target.batch, draft.draft_len}),
          parts((target.kind == EnsembleKind::mixture ? static_cast<int64_t>(target.members.size()) : 1) + 1),
          tiles(tile_count(draft.known_tokens)) {
        require(!target.packed() && !draft.packed, "row_offsets: expected none, got some");
        require(!parents.given || target.steps == draft.draft_len + 1,
                "member_logits: expected a row more than nodes, got others");
        require(!draft.slots.given(), "draft_slots: expected none, got some");
        check_parents(parents, target.batch);
    }
    // Raises where a mass is told of a draft that was drawn from nothing.
    void check_masses(const double* masses) const {
        for (int64_t request = 0; request < target.batch; ++request) {
            for (int64_t index = 0; index < draft.draft_len; ++index) {
                if (masses[draft_part(request, index)] >= 0 && !drawn(request, index)) {
                    fail("masses",
                         "a negative one of draft " + std::to_string(index) + " of request " + std::to_string(request) +
                             ", which nobody drew",
                         std::to_string(masses[draft_part(request, index)]));
                }
            }
        }
    }
    int64_t state_size() const { return slice_state(tiles); }
    // The row that a draft was drawn at, negative for padding.
    int64_t row_of(int64_t request, int64_t draft_index) const {
        return parents.given ? parents(request, draft_index) + 1 : draft_index;
    }
    // Of all rows' parts, that of what a draft was drawn from.
    int64_t draft_part(int64_t request, int64_t draft_index) const {
        return (request * target.steps + draft_index + 1) * parts - 1;
    }
    // The tokens that are looked up in what a draft was drawn from: its own, or those of all nodes.
    int64_t looked_in_draft() const { return parents.given ? draft.draft_len : 1; }
    int64_t looked_size() const { return parts - 1 + looked_in_draft(); }

  private:
    bool drawn(int64_t request, int64_t index) const {
        const int64_t member = draft.drafter_of(request, index);
        return row_of(request, index) >= 0 && draft.sampling.valid(request) &&
               (draft.logits || (member >= 0 && member < static_cast<int64_t>(target.members.size())));
    }
};

// What is told of each row, and kept for the operations after. Where a part has no token, or is not looked at, its
// largest logit is -inf.
struct ShardNumbers {
    double *largest, *sums;  // [batch, steps, parts]
    int64_t* tokens;         // [batch, steps]: the most likely one, of targets that are one softmax
    int32_t* status;         // [batch, steps, 2], of the target's logits and of the draft's
    // [batch, draft_len, looked_size]: the logit of the draft in the target's parts, then in what it was drawn from, in
    // a tree those of its siblings there
    double* looked;
    float* state;  // [batch, steps, parts, state_size]
};

// A row of each of `count` places of each request.
struct ShardPlaces {
    int64_t count;
    const int64_t* rows;   // [batch, count]
    const double* shares;  // [batch, count], the target's part in what is left
    // [batch, steps, parts]: the mass of the slice over that of what is kept of the row, though more of the slice
    // counts than is kept; negative: no token, a one-hot draft
    const double* masses;
    const float* state;  // of ShardNumbers
    const float* least;  // [batch, steps, parts], of the logits that are kept; nullptr: of all
    // [batch, draft_len, 2] of a tree: with which share of what is left of its row a child that was rejected was
    // offered, negative where it is still there, and what its draft distribution is multiplied with
    const double* offers;

    float least_of(int64_t part) const {
        return least != nullptr ? least[part] : -std::numeric_limits<float>::infinity();
    }
};

// What makes log-probabilities of logits, [batch, steps, parts], of the whole row.
struct ShardScale {
    const double* largest;     // the largest logit
    const double* log_totals;  // the logarithm of the mass, relative to that of the largest
};

// Rows of a search for what filters keep: of each step of each part of the target, or of drafts.
struct ShardSearch {
    bool of_drafts;
    const double* masses;  // [batch, steps, parts]; negative: no token
    const float* state;    // of ShardNumbers
    int64_t rows(const ShardRows& call) const {
        return of_drafts ? call.draft.draft_len : call.target.steps * (call.parts - 1);
    }
};

constexpr int64_t shard_buckets = 256;

// What is summed: of tokens whose keys, the bits of a 16-bit logit in their order, begin with a prefix.
struct ShardBuckets {
    const double* largest;  // [batch, rows], the logit that has the mass 1
    const float* least;     // [batch, rows], of the logits
    const int64_t* prefix;  // [batch, rows]
    int64_t shift;          // of the eight bits after it; 16: the first bucket has all, whatever the type of the logits
    bool half, counts;      // float16, else bfloat16; every token counts 1
};

// What a search by samples adds up: the masses of tokens, or how many they are.
struct ShardWeights {
    const double* largest;  // [batch, rows], the logit that has the mass 1
    const float* least;     // [batch, rows], of the logits
    bool counts;
};

// Keys of 32 bits, those of float32 logits in their order. A mass lies in an octave, of the logits of which
// floor(logit / temperature / log 2) is one number; of counts there is one.
struct ShardSamples {
    int64_t octaves;  // whose weights are told, from the highest one here on
    int64_t count;    // of samples
    double* weights;  // [batch, rows, octaves]
    double* codes;    // [batch, rows, 1 + count], the highest octave, and keys each with the share of its octave
};
struct ShardEntries {
    const double* octave;       // [batch, rows], where the keys lie
    const int64_t *low, *high;  // [batch, rows], no key is below, or not below
    int64_t count;
    double* over;               // [batch, rows, 1], the weight above them
    int64_t* keys;              // [batch, rows, count], descending, -1 where there are fewer
    double *repeats, *weights;  // [batch, rows, count], how often each comes, and their weight together
};

// Where the Gumbel noise of rows comes from.
struct ShardNoise {
    const int64_t* seeds;      // [batch]
    const int64_t* positions;  // [batch, places]
    int64_t first_token;       // of the slice, in the whole vocabulary
};

// What siblings that were drawn alike are tested against.
struct ShardRatios {
    int64_t count;
    const int64_t* nodes;  // [batch, places], one of the siblings
    const double* ratios;  // [batch, places, count], ascending
};

// Where tokens are drawn from, [batch].
struct ShardDraws {
    const double* tile_masses;  // [batch, tiles], of the residual
    const bool* subtracts;      // draw from the residual, else from the target
    const double* goals;        // which the cumulative mass shall exceed
};

// A slice of what a draft was drawn from.
class DraftSlice {
  public:
    // As `Softmax::resume` takes it. row: where it was drawn.
    void resume(const TargetArguments& target, const DraftArguments& draft, int64_t request, int64_t index, int64_t row,
                const RowEdits* target_edits, const float* state, double mass, float least) {
        LogitRow logits = draft.logits ? draft.logit_row(request, row)
                                       : target.row(draft.drafter_of(request, index), request, row, nullptr);
        logits.edits = draft.processed ? target_edits : nullptr;
        source_.reset(logits);
        own_.resume(source_, draft.sampling.temperature(request), search_, state, mass, least);
    }
    const Softmax& softmax() const { return own_; }

  private:
    MemberSource source_;
    Softmax own_;
    ThresholdSearch search_;
};

// One row; kept by a thread from call to call.
class ShardVerifier {
  public:
    void read(const ShardRows& call, int64_t request, int64_t step, const ShardNumbers& results);
    // To tile_masses [tiles]: what is left of the target where a draft is rejected, 0 after the drafts; in a tree where
    // the children of a row are that `offers` names.
    void weigh(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index, double* tile_masses);
    // The first token that exceeds the goal, else one of the last with mass; -1 where none has.
    int64_t draw(const ShardRows& call, const ShardPlaces& places, const ShardDraws& draws, int64_t request);
    // The slice's part of what siblings before leave of what a node was drawn from; rows: nodes.
    double mass_of_draft(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index);
    // Over the tokens where share * what is left of a row exceeds a ratio times what a node was drawn from, the sums of
    // the difference and of the latter, [count] each.
    void add_exceeding(const ShardRows& call, const ShardPlaces& places, const ShardRatios& given, int64_t request,
                       int64_t index, double* sums);
    // The slice's part of the target's entropy, in nats.
    double entropy(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index);
    // The target's log-probabilities, to `out` [vocab].
    void write_logprobs(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale, int64_t request,
                        int64_t index, float* out);
    // The likeliest tokens, the lowest first of those alike, then -1, and their log-probabilities, [count] each.
    void find_top(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale, int64_t request,
                  int64_t index, int64_t count, double* values, int64_t* tokens);
    // A token's log-probability.
    double score_of(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale, int64_t request,
                    int64_t index, int64_t token);
    // The tokens of the best scores of those that are kept, best first, and their logits, [count] each; then -1.
    void find_best(const ShardRows& call, const ShardPlaces& places, const ShardNoise& random, int64_t request,
                   int64_t index, int64_t count, double* values, int64_t* tokens);
    void take_samples(const ShardRows& call, const ShardSearch& search, const ShardWeights& weights, int64_t request,
                      int64_t row, const ShardSamples& samples);
    void find_entries(const ShardRows& call, const ShardSearch& search, const ShardWeights& weights, int64_t request,
                      int64_t row, const ShardEntries& entries);
    // To `sums` [shard_buckets].
    void add_up(const ShardRows& call, const ShardSearch& search, const ShardBuckets& buckets, int64_t request,
                int64_t row, double* sums);
    // The largest logits, descending, then -inf; how often more the last of them comes.
    double find_largest(const ShardRows& call, const ShardSearch& search, int64_t request, int64_t row, int64_t count,
                        double* values);

  private:
    // nullptr where there is no token.
    const Softmax* searched(const ShardRows& call, const ShardSearch& search, int64_t request, int64_t row);
    const RowEdits* read_target(const ShardRows& call, int64_t request, int64_t step);
    void resume_draft(DraftSlice& slice, const ShardRows& call, int64_t request, int64_t index, const RowEdits* edits,
                      const float* states, double mass, float least) const;
    void find_children(const ShardRows& call, int64_t request, int64_t row);
    bool resume(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index, bool drafted);
    // Of rows whose log-probabilities are looked at, those of greedy requests too; false where there is no target.
    bool resume_scores(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale, int64_t request,
                       int64_t index);
    const RowEdits* resume_target(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t step);
    // `resume` of a row of a tree and of the children that were offered; masses = what these leave, returns their sum.
    bool resume_offers(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index);
    double remainder_tile(int64_t tile, float* masses) const;
    // Log-probabilities of a tile's tokens, to `out` [tile_size]: under a part, and under the target. Like that of one
    // token they hang on numbers of the whole row only, so that tokens that tie do so on any slices.
    void write_part(size_t part, int64_t tile, double* out) const;
    void write_scores(int64_t tile, double* out) const;
    double score(int64_t token) const;
    // As scores need it.
    double exact_logit(const EnsembleParameters& parameters, int64_t token) const;
    // Calls run(logit) for the tokens of logits that are not below the least.
    template <typename Run>
    void for_logits(const Softmax& own, double least, const Run& run) const;

    // What makes log-probabilities of the parts' logits.
    struct Scores {
        const double *largest, *log_totals;
        double temperature;
    };
    struct Offer {
        int64_t token;
        double share, scale;
        const Softmax* draft;  // nullptr: one-hot
    };
    Scores scores_{};
    std::vector<Scored> top_;
    PathEdits edits_;
    const RowEdits* row_edits_ = nullptr;  // of the row that was read last
    std::vector<int64_t> children_;
    BestList best_;
    std::vector<Offer> offers_;
    std::vector<DraftSlice> slices_ = std::vector<DraftSlice>(1);  // of each drafter, or that of a lone one
    TargetRow target_;
    DraftRow draft_;
    std::vector<LogitRow> logits_;
    std::vector<double> tile_masses_, values_;
    RowNoise noise_;
    std::vector<int64_t> kept_;
    std::vector<uint32_t> counts_;  // of each key of 16 bits, all 0 between calls
    std::vector<uint32_t> keys_, sorted_;
};

// Calls run(verifier, request, row, index) for so many rows of each request.
template <typename Run>
void for_rows(const ShardRows& call, int64_t rows, const Run& run) {
    parallel_for(call.target.batch * rows, 1, [&](int64_t begin, int64_t end) {
        Borrowed<ShardVerifier> verifier(nullptr);
        for (int64_t index = begin; index < end; ++index) {
            run(*verifier, index / rows, index % rows, index);
        }
    });
}

void read_shard(const ShardRows& call, const ShardNumbers& results);
void weigh_shard(const ShardRows& call, const ShardPlaces& places, double* tile_masses);  // [batch, count, tiles]
void draw_of_shard(const ShardRows& call, const ShardPlaces& places, const ShardDraws& draws, int64_t* tokens);
void weigh_drafts_of_shard(const ShardRows& call, const ShardPlaces& places, double* masses);  // [batch, count]
void add_up_exceeding(const ShardRows& call, const ShardPlaces& places, const ShardRatios& given,
                      double* sums);  // [batch, places, 2, ratios]
void add_up_entropies(const ShardRows& call, const ShardPlaces& places, double* entropies);  // [batch, count]
void write_logprobs_of_shard(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale,
                             float* out);  // [batch, count, vocab]
void find_top_of_shard(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale, int64_t count,
                       double* values, int64_t* tokens);  // [batch, places, count] each
void score_tokens_of_shard(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale,
                           const int64_t* tokens, double* scores);  // [batch, places] each
void find_best_of_shard(const ShardRows& call, const ShardPlaces& places, const ShardNoise& random, int64_t count,
                        double* values, int64_t* tokens);  // [batch, places, count] each
void take_samples_of_shard(const ShardRows& call, const ShardSearch& search, const ShardWeights& weights,
                           const ShardSamples& samples);
void find_entries_of_shard(const ShardRows& call, const ShardSearch& search, const ShardWeights& weights,
                           const ShardEntries& entries);
void add_up_shard(const ShardRows& call, const ShardSearch& search, const ShardBuckets& buckets, double* sums);
void find_largest_of_shard(const ShardRows& call, const ShardSearch& search, int64_t count, double* values,
                           double* ties);  // [batch, rows, count], [batch, rows]

}  // namespace specens
