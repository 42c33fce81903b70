/* specens.h: verification of speculative decoding on host memory, for engines in any language.

   C11 and C++. Link libspecens (shared or static); nothing else is needed, Python and torch are not.

   A call takes structs of pointers to the caller's memory and writes into the caller's memory:

       float logits[2 * 3 * 32000];                          // [batch, draft_len + 1, vocab]
       int64_t drafts[2 * 2], seeds[2], positions[2];
       const int64_t rows[] = {2, 3, 32000}, chains[] = {2, 2}, batch[] = {2};
       specens_tensor logits_of = {logits, SPECENS_FLOAT32, 3, rows, NULL};
       specens_tensor drafts_of = {drafts, SPECENS_INT64, 2, chains, NULL};
       specens_tensor seeds_of = {seeds, SPECENS_INT64, 1, batch, NULL};
       specens_tensor positions_of = {positions, SPECENS_INT64, 1, batch, NULL};
       specens_target target = specens_target_init();
       specens_draft draft = specens_draft_init();
       specens_random random = specens_random_init();
       specens_chain chain = specens_chain_init();
       specens_verdict verdict = specens_verdict_init();     // then its tokens, num_accepted, ... point to buffers
       target.member_logits = &logits_of;
       target.num_members = 1;
       draft.tokens = &drafts_of;
       random.seeds = &seeds_of;
       random.positions = &positions_of;
       chain.target = &target;
       chain.draft = &draft;
       chain.random = &random;
       if (specens_verify_chain(&chain, &verdict, NULL) != SPECENS_OK) {
           puts(specens_last_error());
       }

   Structs. The functions *_init give each its defaults; change the fields that differ. The first field is the size,
   which tells what a caller was compiled with: fields that a later version adds have their defaults for it. A pointer
   to a struct that is NULL means all defaults. A struct, and all that it points to, is read during the call only.

   Tensors have the shapes that the comments give. Where a dtype is not named: integers are int64 or int32, numbers a
   request float32, float64, float16 or bfloat16. Strides are free, but where it says contiguous. NULL means not given;
   memory of no element (an empty batch) may be NULL too.

   Errors. A function returns SPECENS_OK, or another code, and then specens_last_error() says which argument was wrong,
   what was expected and what came; results are undefined. What only one request's numbers show (NaN, no token left,
   parameters out of range) is no error of the call: specens_verdict.status has a bit for it, and other requests are
   unaffected.

   Threads. Every function may be called from any number of threads at once, with workspaces (and trees that grow, and
   n-gram indices) of their own. Without a workspace a call runs on its own thread. There is no global state but the
   instruction set, which is chosen once.

   Memory. Scratch memory is kept in the workspace from call to call, without one by the thread, and grows only where a
   call needs more than all calls before it. After specens_workspace_reserve no call within the sizes that it was told
   allocates anything, whatever its settings and numbers are, unless it fails.

   Results are the same as those of the Python package, token for token, from the same seeds. */
#ifndef SPECENS_H
#define SPECENS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define SPECENS_API __attribute__((visibility("default")))
#else
#define SPECENS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Changes with what an earlier caller could not call: arguments of functions, meanings, orders of fields. */
#define SPECENS_ABI_VERSION 1

/* That of the library, to be compared with SPECENS_ABI_VERSION. */
SPECENS_API int32_t specens_abi_version(void);

enum { SPECENS_OK = 0, SPECENS_INVALID_ARGUMENT = 1, SPECENS_OUT_OF_MEMORY = 2, SPECENS_INTERNAL_ERROR = 3 };

/* Of the last call on this thread that failed; "" before. Valid until the next one fails. */
SPECENS_API const char* specens_last_error(void);

/* "avx512", "avx2", "neon" or "plain": at first the best that the processor has. Sets differ in the last bits. */
SPECENS_API const char* specens_instruction_set(void);
/* Takes another one from now on, in all threads; for tests, before other calls. */
SPECENS_API int32_t specens_use_instruction_set(const char* name);

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

enum {
    SPECENS_FLOAT32 = 0,
    SPECENS_FLOAT64 = 1,
    SPECENS_FLOAT16 = 2,
    SPECENS_BFLOAT16 = 3,
    SPECENS_INT32 = 4,
    SPECENS_INT64 = 5,
    SPECENS_UINT8 = 6
};
/* The dtype of elements of so many bytes that are only moved: those of a KV cache. */
#define SPECENS_ELEMENT(bytes) (256 + (bytes))

/* The caller's memory; as DLPack's DLTensor. */
typedef struct specens_tensor {
    void* data;
    int32_t dtype;
    int32_t ndim;
    const int64_t* sizes;   /* [ndim] */
    const int64_t* strides; /* [ndim], in elements; NULL: contiguous */
} specens_tensor;

/* ---- threads and memory ----------------------------------------------------------------------------------------- */

typedef void (*specens_range)(void* of_range, int64_t begin, int64_t end);

/* The caller's threads. run(context, end, grain, range, of_range) calls range(of_range, first, last) for ranges that
   make up 0 to end, each of grain or more, but for the last: on any threads, in any order; and returns when all are
   done. A range never calls run. */
typedef struct specens_threads {
    size_t struct_size;
    int64_t num_threads;
    void (*run)(void* context, int64_t end, int64_t grain, specens_range range, void* of_range);
    void* context;
} specens_threads;

/* Scratch memory and threads of the calls that take it, one after the other. */
typedef struct specens_workspace specens_workspace;

/* threads: the caller's, which live as long as the workspace; NULL: calls run on the thread that makes them. */
SPECENS_API int32_t specens_workspace_create(const specens_threads* threads, specens_workspace** workspace);
SPECENS_API void specens_workspace_destroy(specens_workspace* workspace);

enum { SPECENS_CHAINS = 1, SPECENS_TREES = 2, SPECENS_DRAWS = 4, SPECENS_LOGPROBS = 8, SPECENS_MOVES = 16 };

/* The largest sizes of calls to come. */
typedef struct specens_sizes {
    size_t struct_size;
    int32_t operations; /* a sum of SPECENS_CHAINS (specens_verify_chain), SPECENS_TREES (specens_verify_tree),
                           SPECENS_DRAWS (specens_sample), SPECENS_LOGPROBS (specens_target_logprobs) and SPECENS_MOVES
                           (specens_compact_kv); the others need no memory */
    int64_t vocab;      /* of the widest member or draft logits */
    int64_t members;
    int64_t draft_len; /* of a chain; for specens_target_logprobs, steps */
    int64_t nodes;     /* of a tree */
    int64_t edits;     /* columns of a call's processing tables together: bias, end, prompt and output tokens */
    int64_t top;       /* top_logprobs */
    int64_t batch;     /* of specens_compact_kv, like kept, its columns; up to 256 caches */
    int64_t kept;
} specens_sizes;

/* Allocates all that calls of these sizes need, so that none of them allocates: about 200 bytes for a token of the
   vocabulary, for each of the workspace's threads and of chains, trees and draws; most of it is touched only by calls
   that filter nearly nothing away. Larger calls are no error: the workspace grows with them, as without it. May be
   called again, between calls. */
SPECENS_API int32_t specens_workspace_reserve(specens_workspace* workspace, const specens_sizes* sizes);

/* ---- what is drawn from ----------------------------------------------------------------------------------------- */

/* Sampling parameters; tensors win where they are given. top-k, top-p, min-p, in this order. */
typedef struct specens_sampling {
    size_t struct_size;
    double temperature;                 /* 0: the most likely token */
    double top_p;                       /* 1: off */
    double min_p;                       /* 0: off */
    int64_t top_k;                      /* 0: off */
    int32_t min_p_first;                /* 1: min-p before the others */
    const specens_tensor* temperatures; /* [batch], like the next ones */
    const specens_tensor* top_ps;
    const specens_tensor* min_ps;
    const specens_tensor* top_ks; /* integers */
} specens_sampling;

/* Logit processing of every member's logits, at every row; tensors win where they are given. */
typedef struct specens_processing {
    size_t struct_size;
    double repetition_penalty;                  /* 1: off */
    double frequency_penalty;                   /* 0: off */
    double presence_penalty;                    /* 0: off */
    int64_t min_tokens;                         /* end_tokens have probability 0 before so many tokens of output */
    const specens_tensor* repetition_penalties; /* [batch], like the next ones */
    const specens_tensor* frequency_penalties;
    const specens_tensor* presence_penalties;
    const specens_tensor* min_tokens_rows; /* integers */
    const specens_tensor* bias_tokens;     /* integers [batch, n]; ids outside the vocabulary are padding, in all */
    const specens_tensor* bias_values;     /* float32 [batch, n], contiguous */
    const specens_tensor* end_tokens;      /* integers [batch, n] */
    const specens_tensor* prompt_tokens;   /* integers [batch, n] */
    const specens_tensor* output_tokens;   /* integers [batch, n] */
} specens_processing;

enum { SPECENS_SINGLE = 0, SPECENS_MIXTURE = 1, SPECENS_LOGIT_MIXTURE = 2 };

/* The target distribution: of one model, or of an ensemble. A mixture is sum weight_i * softmax(logits_i /
   temperature), weights >= 0 with sum 1; a logit mixture softmax(sum weight_i * logits_i / temperature), of any
   weights. */
typedef struct specens_target {
    size_t struct_size;
    /* Raw logits, float32, bfloat16 or float16, of num_members tensors: [batch, steps, vocab of the member], contiguous
       in the vocabulary; where there is one step also [batch, vocab]; with row_offsets [rows, vocab]. */
    const specens_tensor* member_logits;
    int64_t num_members;
    int32_t ensemble;                  /* SPECENS_SINGLE, ... */
    int32_t filter_members;            /* 1, for a mixture: sampling filters act on each member, not on the mixture */
    const double* weights;             /* [num_members], of an ensemble without weight_rows */
    const specens_tensor* weight_rows; /* float32 [batch, num_members], contiguous */
    double plausibility; /* logit mixtures, above 0: excludes tokens less likely under member 0 than so many times its
                            most likely one */
    const specens_tensor*
        row_offsets;               /* [batch + 1]: request b has the rows row_offsets[b] to row_offsets[b + 1] - 1 */
    const specens_tensor* allowed; /* int32 [batch, steps, words], or [rows, words]: token v may come where bit v % 32
                                      of word v / 32 is set; contiguous words */
    const specens_sampling* sampling;
    const specens_processing* processing;
} specens_target;

/* Draft tokens, and what they were drawn from: a member's distribution, logits of an outside drafter, or neither
   (chosen and not drawn: greedy, n-grams). */
typedef struct specens_draft {
    size_t struct_size;
    const specens_tensor* tokens;   /* [batch, draft_len], or [drafts]: packed, with row_offsets; -1 ends a chain */
    int64_t drafter;                /* the member that drew all of them; -1: none */
    const specens_tensor* drafters; /* like tokens: the member that drew each */
    const specens_tensor* logits; /* [batch, draft_len, vocab], packed [drafts, vocab], with slots [slots, draft_len or
                                     more, vocab]; for a tree [batch, nodes + 1, vocab]; dtypes of member_logits */
    const specens_tensor* slots;  /* [batch] */
    const specens_tensor* lens;   /* [batch], 0 to draft_len: the drafts, or a tree's nodes, of a request */
    int64_t max_draft_len;        /* of packed tokens, the most of a request; -1: that of the shape */
    int32_t processed;            /* 1: drawn from logits with the target's processing and bit mask */
    const specens_sampling* sampling; /* what they were drawn with; NULL: as the target */
} specens_draft;

/* Random numbers: by Philox from seeds and positions, or given; neither where nothing is drawn (temperature 0). */
typedef struct specens_random {
    size_t struct_size;
    const specens_tensor* seeds;     /* integers [batch] */
    const specens_tensor* positions; /* integers [batch]: the absolute position of a round's first draft token */
    const specens_tensor* uniforms;  /* float64 or float32 in [0, 1): of each draft and, last, of the next token:
                                        [batch, draft_len + 1]; of a draw [batch] */
} specens_random;

/* ---- verification ----------------------------------------------------------------------------------------------- */

enum {
    SPECENS_RULE_TOKEN = 0,
    SPECENS_RULE_BLOCK = 1,         /* chains only */
    SPECENS_RULE_TYPICAL = 2,       /* threshold, alpha */
    SPECENS_RULE_SYNTHETIC = 3,     /* chains only; table: acceptance rates [draft_len] */
    SPECENS_RULE_THRESHOLD = 4,     /* chains only; threshold */
    SPECENS_RULE_REPLACEMENT = 5,   /* chains only; threshold (alpha), alpha (beta) of Wang et al. 2025 */
    SPECENS_RULE_DECISION_TREE = 6, /* chains only; table: [nodes, 5] of feature, threshold, left, right, replace */
    SPECENS_RULE_GUMBEL = 7,
    SPECENS_RULE_TRAVERSAL = 8, /* trees only */
    SPECENS_RULE_K_SEQ = 9      /* trees only; siblings that were drawn with replacement */
};

typedef struct specens_rule {
    size_t struct_size;
    int32_t kind;
    double threshold;
    double alpha;
    const double* table;
    int64_t table_size;
} specens_rule;

/* Which log-probabilities are told of emitted tokens: under the target, or under the ensemble at temperature 1. */
enum { SPECENS_NO_LOGPROBS = 0, SPECENS_TARGET_LOGPROBS = 1, SPECENS_RAW_LOGPROBS = 2 };

/* A round of chains. Steps are draft_len + 1 with a bonus row, or draft_len without. */
typedef struct specens_chain {
    size_t struct_size;
    const specens_target* target;
    const specens_draft* draft;
    const specens_random* random;
    const specens_rule* rule; /* NULL: SPECENS_RULE_TOKEN */
    int32_t logprobs;
    int64_t top_logprobs; /* so many most likely tokens at each emitted one */
} specens_chain;

/* A round of trees. Steps are nodes + 1: row 0 comes after the committed text, row i + 1 after node i. */
typedef struct specens_tree {
    size_t struct_size;
    const specens_target* target;
    const specens_draft* draft; /* tokens [batch, nodes] */
    const specens_random* random;
    const specens_rule* rule; /* NULL: SPECENS_RULE_TOKEN */
    int32_t logprobs;
    int64_t top_logprobs;
    const specens_tensor* parents; /* [batch, nodes]: -1 after the committed text, else an earlier node; others, and
                                      what is below them, are padding. At most 16,384 nodes */
    int64_t max_levels;            /* the most nodes of a path; deeper ones are padding */
    int32_t without_replacement;   /* 1: siblings were drawn each without the tokens of those before it */
} specens_tree;

/* Bits of a request's status. */
enum {
    SPECENS_STATUS_NAN_LOGITS = 1,
    SPECENS_STATUS_INFINITE_LOGITS = 2,
    SPECENS_STATUS_NO_TOKEN = 4,
    SPECENS_STATUS_MEMBER_WITHOUT_TOKEN = 8,
    SPECENS_STATUS_INVALID_DRAFT_TOKEN = 16,
    SPECENS_STATUS_INVALID_DRAFT_DISTRIBUTION = 32,
    SPECENS_STATUS_EMPTY_RESIDUAL = 64,
    SPECENS_STATUS_INVALID_PARAMETER = 128
};

/* Buffers for results, contiguous, which share no memory with arguments or each other. width is draft_len + 1, for
   trees max_levels + 1. */
typedef struct specens_verdict {
    size_t struct_size;
    int64_t* tokens;       /* [batch, width]: accepted drafts, the next token, then -1 */
    int64_t* num_accepted; /* [batch] */
    int64_t* num_tokens;   /* [batch]: accepted ones and the next token, if there is one */
    int64_t* next_token;   /* [batch], -1: none */
    int32_t* status;       /* [batch] */
    int64_t* path;         /* [batch, max_levels], of trees: the accepted nodes, then -1 */
    float* logprobs;       /* [batch, width], where logprobs are asked for */
    int64_t* top_tokens;   /* [batch, width, top_logprobs], where top_logprobs are: most likely first, then -1 */
    float* top_logprobs;   /* like top_tokens */
} specens_verdict;

/* Accept a prefix of each request's chain, and draw the token after it. workspace: NULL, or where scratch memory and
   threads come from. Sources of the rules: the Python package's verify_chain. */
SPECENS_API int32_t specens_verify_chain(const specens_chain* chain, const specens_verdict* verdict,
                                         specens_workspace* workspace);

/* Accept a path of each request's tree from the root down, and draw the token after it. */
SPECENS_API int32_t specens_verify_tree(const specens_tree* tree, const specens_verdict* verdict,
                                        specens_workspace* workspace);

/* ---- drawing and scoring ---------------------------------------------------------------------------------------- */

/* A draw from the target, of one step. */
typedef struct specens_draw {
    size_t struct_size;
    const specens_target* target; /* member_logits [batch, vocab] */
    const specens_random* random;
    int64_t step;         /* of the draft in its round */
    int64_t stream;       /* 0 and 1 are those of verification; 2: drafts */
    int64_t gumbel_count; /* 0: one token by inverse CDF. n: the tokens of the n best Gumbel scores at positions + step,
                             without replacement, from seeds and positions */
    int32_t logprobs;
    int64_t top_logprobs;
} specens_draw;

/* Buffers for results. count is 1, or gumbel_count. */
typedef struct specens_drawn {
    size_t struct_size;
    int64_t* tokens;     /* [batch, count], -1: none */
    int32_t* status;     /* [batch] */
    float* logprobs;     /* [batch, count], where logprobs are asked for */
    int64_t* top_tokens; /* [batch, top_logprobs] */
    float* top_logprobs; /* [batch, top_logprobs] */
} specens_drawn;

SPECENS_API int32_t specens_sample(const specens_draw* draw, const specens_drawn* drawn, specens_workspace* workspace);

/* Log-probabilities of every token: float32 [batch, steps, vocab], the widest member's, contiguous; -inf where a row
   has no token. drafts: integers [batch, steps - 1 or more], the tokens before each row, for penalties; or NULL. */
SPECENS_API int32_t specens_target_logprobs(const specens_target* target, const specens_tensor* drafts, float* logprobs,
                                            specens_workspace* workspace);

/* uniforms[i], of `count`: the number in [0, 1) of a seed, position, step and stream; all of them [count]. */
SPECENS_API int32_t specens_uniforms(const specens_tensor* seeds, const specens_tensor* positions,
                                     const specens_tensor* steps, int64_t stream, double* uniforms,
                                     specens_workspace* workspace);

/* ---- trees and caches ---------------------------------------------------------------------------------------------
 */

enum {
    SPECENS_MASK_FULL = 0,    /* a byte a key: 1 where a node sees it; [batch, nodes, max_prefix + nodes] */
    SPECENS_MASK_TREE = 1,    /* the same without the prefix; [batch, nodes, nodes] */
    SPECENS_MASK_PACKED = 2,  /* the same as bits, the first key lowest; [batch, nodes, (nodes + 7) / 8] */
    SPECENS_MASK_ADDITIVE = 3 /* 0 where a node sees it, else -inf; [batch, 1, nodes, max_prefix + nodes] */
};

/* The attention mask of draft trees over a committed prefix: a node sees the prefix, its ancestors and itself. */
typedef struct specens_mask {
    size_t struct_size;
    const specens_tensor* parents;     /* [batch, nodes], as of specens_tree */
    const specens_tensor* prefix_lens; /* [batch] */
    const specens_tensor* num_nodes;   /* [batch]; NULL: all */
    int32_t layout;                    /* SPECENS_MASK_FULL, ... */
    int32_t dtype;                     /* of an additive mask: SPECENS_FLOAT32, SPECENS_FLOAT16 or SPECENS_BFLOAT16 */
    int64_t max_prefix;                /* keys of the prefix; 0 where the layout has none */
    int64_t window;                    /* of sliding attention; 0: none */
    void* mask;                        /* written, contiguous */
    int64_t* positions;                /* written, [batch, nodes]: the absolute position of each node */
} specens_mask;

SPECENS_API int32_t specens_tree_mask(const specens_mask* mask, specens_workspace* workspace);

/* Moves the slots of accepted nodes together, in place: after it, the slots of a request from prefix_len on hold its
   kept nodes, in order. */
typedef struct specens_kv_moves {
    size_t struct_size;
    const specens_tensor* caches; /* [num_caches], of any dtype: SPECENS_ELEMENT(bytes); contiguous last dimension */
    int64_t num_caches;
    int64_t batch_dim;          /* which dimension of a cache is the request's, or the block's; from the end: -4, ... */
    int64_t slot_dim;           /* which is the slot's, in the request or block */
    const specens_tensor* kept; /* [batch, width]: ascending nodes, then -1 */
    const specens_tensor* prefix_lens;  /* [batch]: slots before node 0 */
    const specens_tensor* num_kept;     /* [batch]; NULL: up to the first -1 */
    const specens_tensor* block_table;  /* [batch, blocks]: where the slots of a request lie in a paged cache */
    const specens_tensor* slot_mapping; /* [batch, nodes]: the slot of each node in a paged cache, instead */
    int64_t* lengths;                   /* written, [batch]: slots that are in use now */
    int32_t* status; /* written, [batch]: 0, or SPECENS_STATUS_INVALID_PARAMETER where nothing was moved */
} specens_kv_moves;

SPECENS_API int32_t specens_compact_kv(const specens_kv_moves* moves, specens_workspace* workspace);

/* ---- drafting --------------------------------------------------------------------------------------------------- */

/* Of a tree's parents [nodes], -1 or an earlier node each: the depth of each node (0: a first draft token), its first
   child and next sibling (-1: none), and the most nodes of a path. Each result [nodes], or NULL. */
SPECENS_API int32_t specens_tree_links(const specens_tensor* parents, int32_t* depth, int64_t* first_child,
                                       int64_t* next_sibling, int64_t* num_levels);

/* The tree of at most so many nodes and levels (0: any) of largest expected accepted length, if the child of rank r is
   accepted with probability acceptance[r] [ranks], of a sum of at most 1. Writes up to `nodes` of parents and
   child_ranks (or NULL), and how many. Source: Chen et al., "Sequoia", NeurIPS 2024. */
SPECENS_API int32_t specens_best_tree(const double* acceptance, int64_t ranks, int64_t nodes, int64_t max_levels,
                                      int64_t* parents, int64_t* child_ranks, int64_t* num_nodes);

/* A tree that grows from draft probabilities, and keeps its `nodes` of largest path probability; at each step the
   `width` most probable are expanded: newest_only 1, of the newest level (EAGLE-2), else wherever they are (SpecExec).
 */
typedef struct specens_growth specens_growth;

SPECENS_API int32_t specens_growth_create(int64_t nodes, int64_t width, int64_t max_levels, int32_t newest_only,
                                          specens_growth** growth);
SPECENS_API void specens_growth_destroy(specens_growth* growth);
/* The candidates to expand next, [count], valid until the next one is added; -1: the root position, at first. */
SPECENS_API const int64_t* specens_growth_frontier(const specens_growth* growth, int64_t* count);
/* tokens, probabilities: [frontier, columns], what may follow each, float32 or float64; numbered in this order. Of
   probability 0: padding. */
SPECENS_API int32_t specens_growth_add(specens_growth* growth, const specens_tensor* tokens,
                                       const specens_tensor* probabilities);
/* Writes the nodes that are kept: parents, tokens, candidates, up to `nodes` of each (or NULL), and how many. */
SPECENS_API int32_t specens_growth_prune(const specens_growth* growth, int64_t* parents, int64_t* tokens,
                                         int64_t* candidates, int64_t* num_nodes);

/* What followed each n-gram of texts, to draft without a model. max_match: the longest n-gram that is looked up. */
typedef struct specens_ngram_index specens_ngram_index;

SPECENS_API int32_t specens_ngram_index_create(int64_t max_match, specens_ngram_index** index);
SPECENS_API void specens_ngram_index_destroy(specens_ngram_index* index);
/* Goes on with the open text by tokens [count]; ids from 0 to 2^31 - 1. */
SPECENS_API int32_t specens_ngram_index_extend(specens_ngram_index* index, const specens_tensor* tokens);
/* What follows is another text. */
SPECENS_API int32_t specens_ngram_index_begin_text(specens_ngram_index* index);
/* Drafts after the open text: each token is what followed the longest n-gram, of min_match tokens or more, that the
   ones before it end with: last, or with most_frequent 1 most often. Writes up to draft_len tokens, how many, and the
   length of the first n-gram (or NULL). */
SPECENS_API int32_t specens_ngram_index_propose(const specens_ngram_index* index, int64_t draft_len, int64_t min_match,
                                                int32_t most_frequent, int64_t* tokens, int64_t* num_tokens,
                                                int64_t* match_len);

/* ---- defaults --------------------------------------------------------------------------------------------------- */

static inline specens_sampling specens_sampling_init(void) {
    specens_sampling sampling;
    memset(&sampling, 0, sizeof sampling);
    sampling.struct_size = sizeof sampling;
    sampling.temperature = 1;
    sampling.top_p = 1;
    return sampling;
}

static inline specens_processing specens_processing_init(void) {
    specens_processing processing;
    memset(&processing, 0, sizeof processing);
    processing.struct_size = sizeof processing;
    processing.repetition_penalty = 1;
    return processing;
}

static inline specens_target specens_target_init(void) {
    specens_target target;
    memset(&target, 0, sizeof target);
    target.struct_size = sizeof target;
    return target;
}

static inline specens_draft specens_draft_init(void) {
    specens_draft draft;
    memset(&draft, 0, sizeof draft);
    draft.struct_size = sizeof draft;
    draft.drafter = -1;
    draft.max_draft_len = -1;
    draft.processed = 1;
    return draft;
}

static inline specens_random specens_random_init(void) {
    specens_random random;
    memset(&random, 0, sizeof random);
    random.struct_size = sizeof random;
    return random;
}

static inline specens_rule specens_rule_init(void) {
    specens_rule rule;
    memset(&rule, 0, sizeof rule);
    rule.struct_size = sizeof rule;
    return rule;
}

static inline specens_chain specens_chain_init(void) {
    specens_chain chain;
    memset(&chain, 0, sizeof chain);
    chain.struct_size = sizeof chain;
    return chain;
}

static inline specens_tree specens_tree_init(void) {
    specens_tree tree;
    memset(&tree, 0, sizeof tree);
    tree.struct_size = sizeof tree;
    return tree;
}

static inline specens_draw specens_draw_init(void) {
    specens_draw draw;
    memset(&draw, 0, sizeof draw);
    draw.struct_size = sizeof draw;
    draw.stream = 2;
    return draw;
}

static inline specens_verdict specens_verdict_init(void) {
    specens_verdict verdict;
    memset(&verdict, 0, sizeof verdict);
    verdict.struct_size = sizeof verdict;
    return verdict;
}

static inline specens_drawn specens_drawn_init(void) {
    specens_drawn drawn;
    memset(&drawn, 0, sizeof drawn);
    drawn.struct_size = sizeof drawn;
    return drawn;
}

static inline specens_mask specens_mask_init(void) {
    specens_mask mask;
    memset(&mask, 0, sizeof mask);
    mask.struct_size = sizeof mask;
    return mask;
}

static inline specens_kv_moves specens_kv_moves_init(void) {
    specens_kv_moves kv_moves;
    memset(&kv_moves, 0, sizeof kv_moves);
    kv_moves.struct_size = sizeof kv_moves;
    kv_moves.batch_dim = -4;
    kv_moves.slot_dim = -2;
    return kv_moves;
}

static inline specens_sizes specens_sizes_init(void) {
    specens_sizes sizes;
    memset(&sizes, 0, sizeof sizes);
    sizes.struct_size = sizeof sizes;
    sizes.operations = 31;
    sizes.members = 1;
    return sizes;
}

static inline specens_threads specens_threads_init(void) {
    specens_threads threads;
    memset(&threads, 0, sizeof threads);
    threads.struct_size = sizeof threads;
    threads.num_threads = 1;
    return threads;
}

#ifdef __cplusplus
}
#endif

#endif
