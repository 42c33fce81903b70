// The command line of `speculate`.
#pragma once

#include <getopt.h>
#include <specens.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

constexpr const char* usage =
    R"(usage: speculate -m MODEL.gguf (-p PROMPT | -f FILE) [options]

Continues a prompt by speculative decoding: llama.cpp computes, libspecens verifies.

  -m, --model FILE         the model whose text is wanted
  -p, --prompt TEXT        special tokens in it are read as such
  -f, --file FILE          a file that holds the prompt
  -n, --tokens N           new tokens; fewer where the model ends the text (128)
      --draft-model FILE   a smaller model of the same vocabulary that drafts; without one, drafts are what followed
                           the last tokens when they occurred before
      --draft-len N        drafts of a round; 0: plain decoding (8, by a model 4)
      --rule RULE          token, block, or gumbel, by which the text of a seed is that of plain decoding (token)
      --temperature X      0: the most likely token (0.8)
      --top-k N            0: off (0)
      --top-p X            1: off (1)
      --min-p X            0: off (0)
      --seed N             (0)
      --samples N          continue the prompt so many times, with the seeds from --seed on (1)
      --compare            decode plainly too, and tell how much faster this was
      --ids                print token ids, a line a sample, and no text
  -t, --threads N          of llama.cpp; 0: its own choice (0)
)";

struct Options {
    std::string model, draft_model, prompt;
    int64_t tokens = 128, draft_len = -1, top_k = 0, seed = 0, samples = 1, threads = 0;
    double temperature = 0.8, top_p = 1, min_p = 0;
    int32_t rule = SPECENS_RULE_TOKEN;
    bool compare = false, ids = false, help = false;
};

// What is wrong with the command line.
struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The number of an option; `expected` says in words what least and most are.
template <typename Number>
Number number_of(const std::string& option, const char* text, Number least, Number most, const char* expected) {
    char* end = nullptr;
    Number value;
    errno = 0;
    if constexpr (std::is_integral_v<Number>) {
        value = std::strtoll(text, &end, 10);
    } else {
        value = std::strtod(text, &end);
    }
    if (end == text || *end != '\0' || errno != 0 || !(value >= least && value <= most)) {
        throw UsageError(option + ": expected " + expected + ", got '" + text + "'");
    }
    return value;
}

inline int32_t rule_of(const std::string& name) {
    const std::map<std::string, int32_t> rules = {
        {"token", SPECENS_RULE_TOKEN}, {"block", SPECENS_RULE_BLOCK}, {"gumbel", SPECENS_RULE_GUMBEL}};
    const auto found = rules.find(name);
    if (found == rules.end()) {
        throw UsageError("--rule: expected token, block or gumbel, got '" + name + "'");
    }
    return found->second;
}

inline std::string contents_of(const char* path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        throw UsageError(std::string("--file: cannot read ") + path);
    }
    return {std::istreambuf_iterator<char>(file), {}};
}

// An option, and what its value does.
struct Entry {
    const char* name;
    char letter;  // 0: none
    bool has_value;
    std::function<void(const char*)> take;
};

inline std::vector<Entry> entries_of(Options& own) {
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    const auto text = [](const char* name, char letter, std::string& place) {
        return Entry{name, letter, true, [&place](const char* value) { place = value; }};
    };
    const auto number = [](const char* name, char letter, auto& place, auto least, auto greatest,
                           const char* expected) {
        using Number = std::decay_t<decltype(place)>;
        return Entry{name, letter, true, [=, &place](const char* value) {
                         place = number_of<Number>(std::string("--") + name, value, least, greatest, expected);
                     }};
    };
    const auto flag = [](const char* name, char letter, bool& place) {
        return Entry{name, letter, false, [&place](const char*) { place = true; }};
    };
    return {text("model", 'm', own.model),
            text("prompt", 'p', own.prompt),
            {"file", 'f', true, [&own](const char* value) { own.prompt = contents_of(value); }},
            text("draft-model", 0, own.draft_model),
            {"rule", 0, true, [&own](const char* value) { own.rule = rule_of(value); }},
            number("tokens", 'n', own.tokens, 1, most, "a number above 0"),
            number("draft-len", 0, own.draft_len, 0, 256, "0 to 256"),
            number("temperature", 0, own.temperature, 0.0, 1e6, "0 or a positive number"),
            number("top-k", 0, own.top_k, 0, most, "0 or more"),
            number("top-p", 0, own.top_p, 1e-9, 1.0, "above 0, up to 1"),
            number("min-p", 0, own.min_p, 0.0, 1.0, "0 to 1"),
            number("seed", 0, own.seed, INT64_MIN, INT64_MAX, "an integer of 64 bits"),
            number("samples", 0, own.samples, 1, most, "a number above 0"),
            number("threads", 't', own.threads, 0, 4096, "0 to 4096"),
            flag("compare", 0, own.compare),
            flag("ids", 0, own.ids),
            flag("help", 'h', own.help)};
}

inline Options parse(int count, char** arguments) {
    Options own;
    const std::vector<Entry> entries = entries_of(own);
    std::vector<option> known;
    std::string letters;
    for (const Entry& entry : entries) {
        known.push_back({entry.name, entry.has_value ? required_argument : no_argument, nullptr,
                         entry.letter != 0 ? entry.letter : 256 + static_cast<int>(known.size())});
        if (entry.letter != 0) {
            letters += entry.letter;
            letters += entry.has_value ? ":" : "";
        }
    }
    known.push_back({});
    for (int code; (code = getopt_long(count, arguments, letters.c_str(), known.data(), nullptr)) != -1;) {
        const auto found =
            std::find_if(known.begin(), known.end() - 1, [code](const option& o) { return o.val == code; });
        if (found == known.end() - 1) {
            throw UsageError("see speculate --help");  // getopt has said what is wrong
        }
        entries[static_cast<size_t>(found - known.begin())].take(optarg);
    }
    if (own.help) {
        return own;
    }
    if (optind < count) {
        throw UsageError(std::string("expected options, got '") + arguments[optind] + "'");
    }
    if (own.model.empty() || own.prompt.empty()) {
        throw UsageError(own.model.empty() ? "--model: expected a GGUF file" : "--prompt: expected a text, or --file");
    }
    if (own.draft_len < 0) {
        own.draft_len = own.draft_model.empty() ? 8 : 4;
    }
    return own;
}
