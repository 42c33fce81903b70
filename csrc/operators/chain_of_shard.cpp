#include <algorithm>
#include <type_traits>

#include "operators/call.h"
#include "operators/results.h"
#include "verify_chain/shard.h"

#define SPECENS_PLACES \
    "Tensor[] member_logits, Tensor draft_tokens, Tensor row_of, Tensor shares, Tensor masses, Tensor state"
#define SPECENS_SEARCH "Tensor[] member_logits, Tensor draft_tokens, Tensor masses, Tensor state, bool of_drafts"
#define SPECENS_SHARD_OPTIONS SPECENS_DRAFT_OPTIONS ", " SPECENS_TARGET_OPTIONS ", Tensor? parents=None"

namespace specens {
namespace {

// A contiguous tensor of this shape.
template <typename Number>
const Number* numbers_of(const char* name, const TorchTensor& tensor, std::initializer_list<int64_t> sizes) {
    constexpr bool is_double = std::is_same_v<Number, double>, is_float = std::is_same_v<Number, float>;
    constexpr ScalarType dtype = is_double                      ? ScalarType::Double
                                 : is_float                     ? ScalarType::Float
                                 : std::is_same_v<Number, bool> ? ScalarType::Bool
                                                                : ScalarType::Long;
    require_shape(name, view(tensor), sizes);
    if (!tensor.is_cpu() || tensor.scalar_type() != dtype || !tensor.is_contiguous()) {
        const char* type = is_double ? "float64" : is_float ? "float32" : dtype == ScalarType::Bool ? "bool" : "int64";
        fail(name, std::string("contiguous ") + type + " on the CPU", "another dtype, layout or device");
    }
    return static_cast<const Number*>(tensor.const_data_ptr());
}

class ShardCall {
  public:
    ShardCall(const Members& member_logits, const TorchTensor& draft_tokens, int64_t drafter,
              const OptionalTensor& drafters, const OptionalTensors& draft_logits, const Numbers& draft_sampling,
              bool process_drafts, const TargetOptions& options, const OptionalTensor& parents)
        : call_(member_logits, options),
          rows((call_.set_draft(draft_tokens, std::nullopt, drafter, drafters, draft_logits, draft_sampling,
                                options.rows, process_drafts),
                &call_.target),
               call_.draft, call_.view(parents)) {}
    // end: no row of a place is as large.
    ShardPlaces places(const TorchTensor& row_of, const TorchTensor& shares, const TorchTensor& masses,
                       const TorchTensor& state, const OptionalTensor& least, const OptionalTensor& offers,
                       int64_t end) const {
        const int64_t batch = rows.target.batch, drafts = rows.draft.draft_len;
        const int64_t* own = numbers_of<int64_t>("rows", row_of, {batch, any_size});
        const int64_t count = row_of.size(1);
        const auto there = [end](int64_t row) { return row >= 0 && row < end; };
        const int64_t* const wrong = std::find_if_not(own, own + batch * count, there);
        if (wrong != own + batch * count) {
            fail("rows", "0 to " + std::to_string(end - 1), std::to_string(*wrong));
        }
        return {count,
                own,
                numbers_of<double>("shares", shares, {batch, count}),
                masses_of(masses),
                state_of(state),
                least ? of_parts<float>("least", *least) : nullptr,
                offers ? numbers_of<double>("offers", *offers, {batch, drafts, 2}) : nullptr};
    }
    ShardPlaces places(const TorchTensor& row_of, const TorchTensor& shares, const TorchTensor& masses,
                       const TorchTensor& state, const OptionalTensor& least) const {
        return places(row_of, shares, masses, state, least, std::nullopt, rows.draft.draft_len + 1);
    }
    ShardPlaces offered(const TorchTensor& row_of, const TorchTensor& shares, const TorchTensor& masses,
                        const TorchTensor& state, const OptionalTensor& least, const OptionalTensor& offers) const {
        require(offers.has_value() == rows.parents.given, "offers, parents: expected both or neither");
        return places(row_of, shares, masses, state, least, offers, rows.draft.draft_len + 1);
    }
    void require_drawn_trees() const {
        require(rows.parents.given && rows.draft.has_distributions(),
                "parents, drafter: expected those of trees, got none");
    }
    ShardScale scale(const TorchTensor& largest, const TorchTensor& log_totals) const {
        return {of_parts<double>("largest", largest), of_parts<double>("log_totals", log_totals)};
    }
    ShardWeights weights(const TorchTensor& largest, const TorchTensor& least, bool counts, int64_t count) const {
        return {numbers_of<double>("largest", largest, {rows.target.batch, count}),
                numbers_of<float>("least", least, {rows.target.batch, count}), counts};
    }
    ShardSearch search(const TorchTensor& masses, const TorchTensor& state, bool of_drafts) const {
        return {of_drafts, masses_of(masses), state_of(state)};
    }

  private:
    template <typename Number>
    const Number* of_parts(const char* name, const TorchTensor& tensor) const {
        return numbers_of<Number>(name, tensor, {rows.target.batch, rows.target.steps, rows.parts});
    }
    const float* state_of(const TorchTensor& state) const {
        return numbers_of<float>("state", state, {rows.target.batch, rows.target.steps, rows.parts, rows.state_size()});
    }
    const double* masses_of(const TorchTensor& masses) const {
        const auto* own = of_parts<double>("masses", masses);
        rows.check_masses(own);
        return own;
    }
    Call call_;

  public:
    ShardRows rows;
};

void chain_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                        int64_t drafter, const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                        const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                        const Numbers& ensemble, const Numbers& sampling, const Rows& rows, const Numbers& processing,
                        const Rows& processing_rows, const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    const int64_t batch = call.rows.target.batch, steps = call.rows.target.steps, parts = call.rows.parts;
    ShardNumbers found{};
    found.largest = results.add<double>({batch, steps, parts}, ScalarType::Double);
    found.sums = results.add<double>({batch, steps, parts}, ScalarType::Double);
    found.tokens = results.add<int64_t>({batch, steps}, ScalarType::Long);
    found.status = results.add<int32_t>({batch, steps, 2}, ScalarType::Int);
    found.looked = results.add<double>({batch, call.rows.draft.draft_len, call.rows.looked_size()}, ScalarType::Double);
    found.state = results.add<float>({batch, steps, parts, call.rows.state_size()}, ScalarType::Float);
    const TorchThreads threads;
    read_shard(call.rows, found);
}

void residual_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                           const TorchTensor& row_of, const TorchTensor& shares, const TorchTensor& masses,
                           const TorchTensor& state, const OptionalTensor& least, const OptionalTensor& offers,
                           int64_t drafter, const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                           const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                           const Numbers& ensemble, const Numbers& sampling, const Rows& rows,
                           const Numbers& processing, const Rows& processing_rows, const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    const ShardPlaces places = call.offered(row_of, shares, masses, state, least, offers);
    double* out = results.add<double>({call.rows.target.batch, places.count, call.rows.tiles}, ScalarType::Double);
    const TorchThreads threads;
    weigh_shard(call.rows, places, out);
}

void draw_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                       const TorchTensor& row_of, const TorchTensor& shares, const TorchTensor& masses,
                       const TorchTensor& state, const TorchTensor& block_masses, const TorchTensor& subtracts,
                       const TorchTensor& goals, const OptionalTensor& least, const OptionalTensor& offers,
                       int64_t drafter, const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                       const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                       const Numbers& ensemble, const Numbers& sampling, const Rows& rows, const Numbers& processing,
                       const Rows& processing_rows, const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    const int64_t batch = call.rows.target.batch;
    const ShardPlaces places = call.offered(row_of, shares, masses, state, least, offers);
    require(places.count == 1, "rows: expected [batch, 1]");
    const ShardDraws draws{numbers_of<double>("block_masses", block_masses, {batch, call.rows.tiles}),
                           numbers_of<bool>("subtracts", subtracts, {batch}),
                           numbers_of<double>("goals", goals, {batch})};
    int64_t* tokens = results.add<int64_t>({batch}, ScalarType::Long);
    const TorchThreads threads;
    draw_of_shard(call.rows, places, draws, tokens);
}

void entropies_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                            const TorchTensor& row_of, const TorchTensor& shares, const TorchTensor& masses,
                            const TorchTensor& state, const OptionalTensor& least, int64_t drafter,
                            const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                            const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                            const Numbers& ensemble, const Numbers& sampling, const Rows& rows,
                            const Numbers& processing, const Rows& processing_rows, const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    const ShardPlaces places = call.places(row_of, shares, masses, state, least);
    double* out = results.add<double>({call.rows.target.batch, places.count}, ScalarType::Double);
    const TorchThreads threads;
    add_up_entropies(call.rows, places, out);
}

void mass_of_drafts_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                                 const TorchTensor& row_of, const TorchTensor& shares, const TorchTensor& masses,
                                 const TorchTensor& state, const OptionalTensor& least, int64_t drafter,
                                 const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                                 const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                                 const Numbers& ensemble, const Numbers& sampling, const Rows& rows,
                                 const Numbers& processing, const Rows& processing_rows,
                                 const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    call.require_drawn_trees();
    const ShardPlaces places =
        call.places(row_of, shares, masses, state, least, std::nullopt, call.rows.draft.draft_len);
    double* out = results.add<double>({call.rows.target.batch, places.count}, ScalarType::Double);
    const TorchThreads threads;
    weigh_drafts_of_shard(call.rows, places, out);
}

void exceeding_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                            const TorchTensor& row_of, const TorchTensor& shares, const TorchTensor& masses,
                            const TorchTensor& state, const TorchTensor& nodes, const TorchTensor& ratios,
                            const OptionalTensor& least, const OptionalTensor& offers, int64_t drafter,
                            const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                            const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                            const Numbers& ensemble, const Numbers& sampling, const Rows& rows,
                            const Numbers& processing, const Rows& processing_rows, const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    const ShardPlaces places = call.offered(row_of, shares, masses, state, least, offers);
    call.require_drawn_trees();
    const int64_t batch = call.rows.target.batch, all = batch * places.count;
    require(ratios.dim() == 3 && ratios.size(2) > 0, "ratios: expected [batch, n, ratios]");
    const int64_t count = ratios.size(2);
    const ShardRatios given{count, numbers_of<int64_t>("nodes", nodes, {batch, places.count}),
                            numbers_of<double>("ratios", ratios, {batch, places.count, count})};
    require(std::all_of(given.nodes, given.nodes + all,
                        [&](int64_t node) { return node >= 0 && node < call.rows.draft.draft_len; }),
            "nodes: expected those of the trees, got others");
    double* sums = results.add<double>({batch, places.count, 2, count}, ScalarType::Double);
    const TorchThreads threads;
    add_up_exceeding(call.rows, places, given, sums);
}

void logprobs_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                           const TorchTensor& row_of, const TorchTensor& shares, const TorchTensor& masses,
                           const TorchTensor& state, const TorchTensor& largest, const TorchTensor& log_totals,
                           const OptionalTensor& least, int64_t drafter, const OptionalTensor& drafters,
                           const OptionalTensors& draft_logits, const Numbers& draft_sampling, bool process_drafts,
                           const OptionalTensor& allowed, const Numbers& ensemble, const Numbers& sampling,
                           const Rows& rows, const Numbers& processing, const Rows& processing_rows,
                           const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    const ShardPlaces places = call.places(row_of, shares, masses, state, least);
    const ShardScale scale = call.scale(largest, log_totals);
    float* out = results.add<float>({call.rows.target.batch, places.count, call.rows.target.vocab}, ScalarType::Float);
    const TorchThreads threads;
    write_logprobs_of_shard(call.rows, places, scale, out);
}

void top_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                      const TorchTensor& row_of, const TorchTensor& shares, const TorchTensor& masses,
                      const TorchTensor& state, const TorchTensor& largest, const TorchTensor& log_totals,
                      int64_t count, const OptionalTensor& least, int64_t drafter, const OptionalTensor& drafters,
                      const OptionalTensors& draft_logits, const Numbers& draft_sampling, bool process_drafts,
                      const OptionalTensor& allowed, const Numbers& ensemble, const Numbers& sampling, const Rows& rows,
                      const Numbers& processing, const Rows& processing_rows, const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    const ShardPlaces places = call.places(row_of, shares, masses, state, least);
    require(count > 0, "count: expected at least 1");
    const ShardScale scale = call.scale(largest, log_totals);
    double* values = results.add<double>({call.rows.target.batch, places.count, count}, ScalarType::Double);
    int64_t* tokens = results.add<int64_t>({call.rows.target.batch, places.count, count}, ScalarType::Long);
    const TorchThreads threads;
    find_top_of_shard(call.rows, places, scale, count, values, tokens);
}

void scores_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                         const TorchTensor& row_of, const TorchTensor& shares, const TorchTensor& masses,
                         const TorchTensor& state, const TorchTensor& largest, const TorchTensor& log_totals,
                         const TorchTensor& tokens, const OptionalTensor& least, int64_t drafter,
                         const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                         const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                         const Numbers& ensemble, const Numbers& sampling, const Rows& rows, const Numbers& processing,
                         const Rows& processing_rows, const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    const ShardPlaces places = call.places(row_of, shares, masses, state, least);
    const int64_t batch = call.rows.target.batch;
    const ShardScale scale = call.scale(largest, log_totals);
    const auto* ids = numbers_of<int64_t>("tokens", tokens, {batch, places.count});
    double* out = results.add<double>({batch, places.count}, ScalarType::Double);
    const TorchThreads threads;
    score_tokens_of_shard(call.rows, places, scale, ids, out);
}

void best_kept_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                            const TorchTensor& row_of, const TorchTensor& shares, const TorchTensor& masses,
                            const TorchTensor& state, const TorchTensor& seeds, const TorchTensor& positions,
                            int64_t first_token, int64_t count, const OptionalTensor& least, int64_t drafter,
                            const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                            const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                            const Numbers& ensemble, const Numbers& sampling, const Rows& rows,
                            const Numbers& processing, const Rows& processing_rows, const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    const ShardPlaces places = call.places(row_of, shares, masses, state, least);
    const int64_t batch = call.rows.target.batch;
    require(call.rows.target.kind != EnsembleKind::mixture, "ensemble: expected a lone model or a mixture of logits");
    require(first_token >= 0 && first_token < int64_t{1} << 31, "first_token: expected one below 2^31");
    const ShardNoise random{numbers_of<int64_t>("seeds", seeds, {batch}),
                            numbers_of<int64_t>("positions", positions, {batch, places.count}), first_token};
    require(count > 0, "count: expected at least 1");
    double* values = results.add<double>({batch, places.count, count}, ScalarType::Double);
    int64_t* tokens = results.add<int64_t>({batch, places.count, count}, ScalarType::Long);
    const TorchThreads threads;
    find_best_of_shard(call.rows, places, random, count, values, tokens);
}

void samples_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                          const TorchTensor& masses, const TorchTensor& state, bool of_drafts,
                          const TorchTensor& largest, const TorchTensor& least, bool counts, int64_t octaves,
                          int64_t count, int64_t drafter, const OptionalTensor& drafters,
                          const OptionalTensors& draft_logits, const Numbers& draft_sampling, bool process_drafts,
                          const OptionalTensor& allowed, const Numbers& ensemble, const Numbers& sampling,
                          const Rows& rows, const Numbers& processing, const Rows& processing_rows,
                          const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    const ShardSearch search = call.search(masses, state, of_drafts);
    const int64_t batch = call.rows.target.batch, found = search.rows(call.rows);
    const ShardWeights weights = call.weights(largest, least, counts, found);
    require(octaves > 0 && count > 0, "octaves, count: expected at least 1");
    const ShardSamples samples{octaves, count, results.add<double>({batch, found, octaves}, ScalarType::Double),
                               results.add<double>({batch, found, 1 + count}, ScalarType::Double)};
    const TorchThreads threads;
    take_samples_of_shard(call.rows, search, weights, samples);
}

void entries_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                          const TorchTensor& masses, const TorchTensor& state, bool of_drafts,
                          const TorchTensor& largest, const TorchTensor& least, bool counts, const TorchTensor& octave,
                          const TorchTensor& low, const TorchTensor& high, int64_t count, int64_t drafter,
                          const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                          const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                          const Numbers& ensemble, const Numbers& sampling, const Rows& rows, const Numbers& processing,
                          const Rows& processing_rows, const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    const ShardSearch search = call.search(masses, state, of_drafts);
    const int64_t batch = call.rows.target.batch, found = search.rows(call.rows);
    const ShardWeights weights = call.weights(largest, least, counts, found);
    require(count > 0, "count: expected at least 1");
    const ShardEntries entries{numbers_of<double>("octave", octave, {batch, found}),
                               numbers_of<int64_t>("low", low, {batch, found}),
                               numbers_of<int64_t>("high", high, {batch, found}),
                               count,
                               results.add<double>({batch, found, 1}, ScalarType::Double),
                               results.add<int64_t>({batch, found, count}, ScalarType::Long),
                               results.add<double>({batch, found, count}, ScalarType::Double),
                               results.add<double>({batch, found, count}, ScalarType::Double)};
    const TorchThreads threads;
    find_entries_of_shard(call.rows, search, weights, entries);
}

void buckets_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                          const TorchTensor& masses, const TorchTensor& state, bool of_drafts,
                          const TorchTensor& largest, const TorchTensor& least, const TorchTensor& prefix,
                          int64_t shift, bool half, bool counts, int64_t drafter, const OptionalTensor& drafters,
                          const OptionalTensors& draft_logits, const Numbers& draft_sampling, bool process_drafts,
                          const OptionalTensor& allowed, const Numbers& ensemble, const Numbers& sampling,
                          const Rows& rows, const Numbers& processing, const Rows& processing_rows,
                          const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    const ShardSearch search = call.search(masses, state, of_drafts);
    const int64_t batch = call.rows.target.batch, count = search.rows(call.rows);
    const ShardBuckets buckets{numbers_of<double>("largest", largest, {batch, count}),
                               numbers_of<float>("least", least, {batch, count}),
                               numbers_of<int64_t>("prefix", prefix, {batch, count}),
                               shift,
                               half,
                               counts};
    require(shift == 0 || shift == 8 || shift == 16, "shift: expected 0, 8 or 16");
    double* sums = results.add<double>({batch, count, shard_buckets}, ScalarType::Double);
    const TorchThreads threads;
    add_up_shard(call.rows, search, buckets, sums);
}

void largest_of_shard_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                          const TorchTensor& masses, const TorchTensor& state, bool of_drafts, int64_t count,
                          int64_t drafter, const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                          const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                          const Numbers& ensemble, const Numbers& sampling, const Rows& rows, const Numbers& processing,
                          const Rows& processing_rows, const OptionalTensor& parents) {
    const ShardCall call(member_logits, draft_tokens, drafter, drafters, draft_logits, draft_sampling, process_drafts,
                         {allowed, ensemble, sampling, rows, processing, processing_rows}, parents);
    require(count > 0, "count: expected at least 1");
    const ShardSearch search = call.search(masses, state, of_drafts);
    const int64_t batch = call.rows.target.batch, found = search.rows(call.rows);
    double* values = results.add<double>({batch, found, count}, ScalarType::Double);
    double* ties = results.add<double>({batch, found, 1}, ScalarType::Double);
    const TorchThreads threads;
    find_largest_of_shard(call.rows, search, count, values, ties);
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def("chain_of_shard(Tensor[] member_logits, Tensor draft_tokens, *, " SPECENS_SHARD_OPTIONS
                ") -> Tensor[]");
    library.def("residual_of_shard(" SPECENS_PLACES
                ", *, Tensor? least=None, Tensor? offers=None, " SPECENS_SHARD_OPTIONS ") -> Tensor");
    library.def("draw_of_shard(" SPECENS_PLACES
                ", Tensor block_masses, Tensor subtracts, Tensor goals, *, Tensor? "
                "least=None, Tensor? offers=None, " SPECENS_SHARD_OPTIONS ") -> Tensor");
    library.def("mass_of_drafts_of_shard(" SPECENS_PLACES ", *, Tensor? least=None, " SPECENS_SHARD_OPTIONS
                ") -> Tensor");
    library.def("exceeding_of_shard(" SPECENS_PLACES
                ", Tensor nodes, Tensor ratios, *, Tensor? least=None, Tensor? offers=None, " SPECENS_SHARD_OPTIONS
                ") -> Tensor");
    library.def("entropies_of_shard(" SPECENS_PLACES ", *, Tensor? least=None, " SPECENS_SHARD_OPTIONS ") -> Tensor");
    library.def("logprobs_of_shard(" SPECENS_PLACES
                ", Tensor largest, Tensor log_totals, *, Tensor? least=None, " SPECENS_SHARD_OPTIONS ") -> Tensor");
    library.def("top_of_shard(" SPECENS_PLACES
                ", Tensor largest, Tensor log_totals, int count, *, Tensor? least=None, " SPECENS_SHARD_OPTIONS
                ") -> Tensor[]");
    library.def("scores_of_shard(" SPECENS_PLACES
                ", Tensor largest, Tensor log_totals, Tensor tokens, *, Tensor? least=None, " SPECENS_SHARD_OPTIONS
                ") -> Tensor");
    library.def(
        "best_kept_of_shard(" SPECENS_PLACES
        ", Tensor seeds, Tensor positions, int first_token, int count, *, Tensor? least=None, " SPECENS_SHARD_OPTIONS
        ") -> Tensor[]");
    library.def("samples_of_shard(" SPECENS_SEARCH
                ", Tensor largest, Tensor least, bool counts, int octaves, int count, *, " SPECENS_SHARD_OPTIONS
                ") -> Tensor[]");
    library.def("entries_of_shard(" SPECENS_SEARCH
                ", Tensor largest, Tensor least, bool counts, Tensor octave, Tensor low, Tensor high, int count, "
                "*, " SPECENS_SHARD_OPTIONS ") -> Tensor[]");
    library.def(
        "buckets_of_shard(" SPECENS_SEARCH
        ", Tensor largest, Tensor least, Tensor prefix, int shift, bool half, bool counts, *, " SPECENS_SHARD_OPTIONS
        ") -> Tensor");
    library.def("largest_of_shard(" SPECENS_SEARCH ", int count, *, " SPECENS_SHARD_OPTIONS ") -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    library.impl("chain_of_shard", TORCH_BOX(&specens::Operator<&specens::chain_of_shard_cpu>::make));
    library.impl("residual_of_shard", TORCH_BOX(&specens::Operator<&specens::residual_of_shard_cpu>::make_one));
    library.impl("draw_of_shard", TORCH_BOX(&specens::Operator<&specens::draw_of_shard_cpu>::make_one));
    library.impl("mass_of_drafts_of_shard",
                 TORCH_BOX(&specens::Operator<&specens::mass_of_drafts_of_shard_cpu>::make_one));
    library.impl("exceeding_of_shard", TORCH_BOX(&specens::Operator<&specens::exceeding_of_shard_cpu>::make_one));
    library.impl("entropies_of_shard", TORCH_BOX(&specens::Operator<&specens::entropies_of_shard_cpu>::make_one));
    library.impl("logprobs_of_shard", TORCH_BOX(&specens::Operator<&specens::logprobs_of_shard_cpu>::make_one));
    library.impl("top_of_shard", TORCH_BOX(&specens::Operator<&specens::top_of_shard_cpu>::make));
    library.impl("scores_of_shard", TORCH_BOX(&specens::Operator<&specens::scores_of_shard_cpu>::make_one));
    library.impl("best_kept_of_shard", TORCH_BOX(&specens::Operator<&specens::best_kept_of_shard_cpu>::make));
    library.impl("samples_of_shard", TORCH_BOX(&specens::Operator<&specens::samples_of_shard_cpu>::make));
    library.impl("entries_of_shard", TORCH_BOX(&specens::Operator<&specens::entries_of_shard_cpu>::make));
    library.impl("buckets_of_shard", TORCH_BOX(&specens::Operator<&specens::buckets_of_shard_cpu>::make_one));
    library.impl("largest_of_shard", TORCH_BOX(&specens::Operator<&specens::largest_of_shard_cpu>::make));
}
