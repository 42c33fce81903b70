/* examples/batched_decoder.py in C: the same text from the same weights and seeds. In a shell:

       at() { python -c "import specens_kernels; print(specens_kernels.get_$1())"; }
       use="-I$(at include) -L$(at library) -Wl,-rpath,$(at library) -lspecens -lm"
       python examples/c/write_weights.py weights
       cc examples/c/batched_decoder.c $use -o decoder && ./decoder weights

   The file has, one after the other, the target's and the drafter's tables in float32 (embedding, positions, output,
   query, key, value), then the text [batch, slots], its lengths and the lengths wanted [batch], in int64. */
#include <math.h>
#include <specens.h>
#include <stdio.h>
#include <stdlib.h>

enum { VOCAB = 48, SLOTS = 256, BATCH = 4, DRAFT_LEN = 4, ROWS = DRAFT_LEN + 1, MOST_WIDTH = 16 };

typedef struct {
    int width;
    float embedding[SLOTS][MOST_WIDTH], positions[SLOTS][MOST_WIDTH], output[SLOTS][MOST_WIDTH];
    float query[MOST_WIDTH][MOST_WIDTH], key[MOST_WIDTH][MOST_WIDTH], value[MOST_WIDTH][MOST_WIDTH];
    float keys[BATCH][SLOTS][MOST_WIDTH], values[BATCH][SLOTS][MOST_WIDTH];
} toy_model;

static toy_model target, drafter;
static int64_t text[BATCH][SLOTS], lengths[BATCH], ends[BATCH], seeds[BATCH];

static void read_model(FILE* file, toy_model* model, int width) {
    float (*tables[])[MOST_WIDTH] = {model->embedding, model->positions, model->output,
                                     model->query,     model->key,       model->value};
    model->width = width;
    for (int table = 0; table < 6; ++table) {
        for (int row = 0; row < (table < 3 ? SLOTS : width); ++row) {
            if (fread(tables[table][row], sizeof(float), (size_t)width, file) != (size_t)width) {
                exit(2);
            }
        }
    }
}

static void multiply(const toy_model* model, const float* row, float matrix[MOST_WIDTH][MOST_WIDTH], float* out) {
    for (int column = 0; column < model->width; ++column) {
        out[column] = 0;
        for (int inner = 0; inner < model->width; ++inner) {
            out[column] += row[inner] * matrix[inner][column];
        }
    }
}

/* The logits after a token, whose key goes to a slot. */
static void forward(toy_model* model, int request, int64_t token, int64_t slot, float* logits) {
    float hidden[MOST_WIDTH], query[MOST_WIDTH], weights[SLOTS], mixed[MOST_WIDTH] = {0};
    float largest = -INFINITY, sum = 0;
    for (int column = 0; column < model->width; ++column) {
        hidden[column] = model->embedding[token][column] + 0.3f * model->positions[slot][column];
    }
    multiply(model, hidden, model->key, model->keys[request][slot]);
    multiply(model, hidden, model->value, model->values[request][slot]);
    multiply(model, hidden, model->query, query);
    for (int64_t seen = 0; seen <= slot; ++seen) {
        weights[seen] = 0;
        for (int column = 0; column < model->width; ++column) {
            weights[seen] += query[column] * model->keys[request][seen][column] / 16;
        }
        largest = fmaxf(largest, weights[seen]);
    }
    for (int64_t seen = 0; seen <= slot; ++seen) {
        sum += weights[seen] = expf(weights[seen] - largest);
    }
    for (int64_t seen = 0; seen <= slot; ++seen) {
        for (int column = 0; column < model->width; ++column) {
            mixed[column] += weights[seen] / sum * model->values[request][seen][column];
        }
    }
    for (int row = 0; row < VOCAB; ++row) {
        logits[row] = 0;
        for (int column = 0; column < model->width; ++column) {
            logits[row] += (hidden[column] + mixed[column] / 4) * model->output[row][column] / 2;
        }
    }
}

static void check(int32_t code) {
    if (code != SPECENS_OK) {
        fprintf(stderr, "%s\n", specens_last_error());
        exit(1);
    }
}

static const int64_t per_request[] = {BATCH}, one_row[] = {BATCH, VOCAB}, all_rows[] = {BATCH, ROWS, VOCAB};
static const int64_t drafts_of[] = {BATCH, DRAFT_LEN}, draft_rows[] = {BATCH, DRAFT_LEN, VOCAB};

/* A round: draft, score, verify, commit. */
static void run_round(specens_workspace* workspace) {
    static float logits[BATCH][ROWS][VOCAB], draft_logits[BATCH][DRAFT_LEN][VOCAB], unused[VOCAB];
    int64_t drafts[BATCH][DRAFT_LEN], draft_lens[BATCH], drawn_tokens[BATCH];
    int64_t tokens[BATCH][ROWS], num_accepted[BATCH], num_tokens[BATCH], next_token[BATCH];
    int32_t status[BATCH];
    specens_tensor seeds_of = {seeds, SPECENS_INT64, 1, per_request, NULL};
    specens_tensor positions = {lengths, SPECENS_INT64, 1, per_request, NULL};
    specens_sampling sampling = specens_sampling_init();
    specens_random random = specens_random_init();
    specens_target of_draft = specens_target_init(), of_target = specens_target_init();
    sampling.temperature = 0.8;
    random.seeds = &seeds_of;
    random.positions = &positions;
    of_draft.num_members = of_target.num_members = 1;
    of_draft.sampling = of_target.sampling = &sampling;

    for (int step = 0; step < DRAFT_LEN; ++step) {
        const int64_t strides[] = {DRAFT_LEN * VOCAB, 1};
        specens_tensor row = {draft_logits[0][step], SPECENS_FLOAT32, 2, one_row, strides};
        specens_draw draw = specens_draw_init();
        specens_drawn drawn = specens_drawn_init();
        for (int request = 0; request < BATCH; ++request) {
            const int64_t last = lengths[request] - 1;
            if (step == 0) { /* the drafter may not have seen the one before the last yet */
                forward(&drafter, request, text[request][last - 1], last - 1, unused);
            }
            const int64_t token = step == 0 ? text[request][last] : drafts[request][step - 1];
            forward(&drafter, request, token, last + step, draft_logits[request][step]);
        }
        of_draft.member_logits = &row;
        draw.target = &of_draft;
        draw.random = &random;
        draw.step = step;
        drawn.tokens = drawn_tokens;
        drawn.status = status;
        check(specens_sample(&draw, &drawn, workspace));
        for (int request = 0; request < BATCH; ++request) {
            drafts[request][step] = drawn_tokens[request];
        }
    }
    for (int request = 0; request < BATCH; ++request) {
        const int64_t left = ends[request] - lengths[request] - 1;
        draft_lens[request] = left < 0 ? 0 : left > DRAFT_LEN ? DRAFT_LEN : left;
        for (int row = 0; row < ROWS; ++row) {
            const int64_t slot = lengths[request] - 1 + row;
            forward(&target, request, row == 0 ? text[request][slot] : drafts[request][row - 1], slot,
                    logits[request][row]);
        }
    }
    specens_tensor members = {logits, SPECENS_FLOAT32, 3, all_rows, NULL};
    specens_tensor draft_tokens = {drafts, SPECENS_INT64, 2, drafts_of, NULL};
    specens_tensor draft_numbers = {draft_logits, SPECENS_FLOAT32, 3, draft_rows, NULL};
    specens_tensor lens = {draft_lens, SPECENS_INT64, 1, per_request, NULL};
    specens_draft draft = specens_draft_init();
    specens_chain chain = specens_chain_init();
    specens_verdict verdict = specens_verdict_init();
    of_target.member_logits = &members;
    draft.tokens = &draft_tokens;
    draft.logits = &draft_numbers;
    draft.lens = &lens;
    chain.target = &of_target;
    chain.draft = &draft;
    chain.random = &random;
    verdict.tokens = tokens[0];
    verdict.num_accepted = num_accepted;
    verdict.num_tokens = num_tokens;
    verdict.next_token = next_token;
    verdict.status = status;
    check(specens_verify_chain(&chain, &verdict, workspace));
    for (int request = 0; request < BATCH; ++request) {
        for (int place = 0; place < num_tokens[request] && lengths[request] < ends[request]; ++place) {
            text[request][lengths[request]++] = tokens[request][place];
        }
    }
}

static int unfinished(void) {
    int count = 0;
    for (int request = 0; request < BATCH; ++request) {
        count += lengths[request] < ends[request];
    }
    return count;
}

int main(int count, char** arguments) {
    static float unused[VOCAB];
    specens_workspace* workspace = NULL;
    specens_sizes sizes = specens_sizes_init();
    FILE* file = count == 2 ? fopen(arguments[1], "rb") : NULL;
    if (file == NULL) {
        fprintf(stderr, "batched_decoder: expected a file of weights\n");
        return 2;
    }
    read_model(file, &target, 16);
    read_model(file, &drafter, 14);
    if (fread(text, sizeof text, 1, file) != 1 || fread(lengths, sizeof lengths, 1, file) != 1 ||
        fread(ends, sizeof ends, 1, file) != 1) {
        return 2;
    }
    fclose(file);
    check(specens_workspace_create(NULL, &workspace));
    sizes.operations = SPECENS_CHAINS + SPECENS_DRAWS;
    sizes.vocab = VOCAB;
    sizes.draft_len = DRAFT_LEN;
    check(specens_workspace_reserve(workspace, &sizes)); /* from here on no call allocates */
    for (int request = 0; request < BATCH; ++request) {
        seeds[request] = request;
        for (int64_t slot = 0; slot < lengths[request]; ++slot) {
            forward(&target, request, text[request][slot], slot, unused);
            forward(&drafter, request, text[request][slot], slot, unused);
        }
    }
    while (unfinished()) {
        run_round(workspace);
    }
    specens_workspace_destroy(workspace);
    for (int request = 0; request < BATCH; ++request) {
        for (int64_t slot = 0; slot < ends[request]; ++slot) {
            printf("%lld%c", (long long)text[request][slot], slot + 1 < ends[request] ? ' ' : '\n');
        }
    }
    return 0;
}
