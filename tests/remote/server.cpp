// Calls libspecens, and its row kernels, for a client at the other end of a pipe: remote.py, which may run on another
// processor. Usage: server INSTRUCTION_SET THREADS. Every call is made by that many threads at once, each on memory of
// its own, and every second one in a workspace with threads; all must give the same bytes.
//
// A request: the function, then how many blobs, pointers and arguments; of each blob its size and kind; the bytes of
// the blobs; of each pointer the blob and offset where it lies, and those that it points to; of each argument its kind
// and two numbers. The answer: what is wrong with the call, the function's result, specens_last_error(), and the blobs
// that are not structs. All numbers are int64.
#include <algorithm>
#include <barrier>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "include/specens.h"
#include "parts/rows.h"

namespace {

using Bytes = std::vector<char>;

constexpr int64_t peek = -1;  // the function that gives the bytes at an address

enum BlobKind : int64_t { of_structs, of_data, of_handle };
enum ArgumentKind : int64_t { number, in_blob };

struct Pointer {
    int64_t blob, offset, target, target_offset;
};

struct Argument {
    int64_t kind, first, second;  // a number; or a blob and an offset in it
};

struct Request {
    int64_t function;
    std::vector<int64_t> kinds;  // of blobs
    std::vector<Bytes> blobs;
    std::vector<Pointer> pointers;
    std::vector<Argument> arguments;
};

// The caller's threads of a workspace.
void run_on_threads(void*, int64_t end, int64_t grain, specens_range range, void* of_range) {
    const int64_t half = std::max(grain, end / 2);
    std::thread other([=] { range(of_range, 0, std::min(half, end)); });
    if (half < end) {
        range(of_range, half, end);
    }
    other.join();
}

// One of the threads that make a call, and what it has.
struct Caller {
    specens_workspace* workspace = nullptr;
    std::map<int64_t, void*> handles;  // by what the client knows them as: those of the first thread
    std::vector<Bytes> blobs;
    Bytes result;
    std::string message;

    void adopt(const Request& request) {
        blobs = request.blobs;
        for (const Pointer& pointer : request.pointers) {
            const char* target = blobs[pointer.target].data() + pointer.target_offset;
            std::memcpy(blobs[pointer.blob].data() + pointer.offset, &target, sizeof(target));
        }
    }
    template <typename Type>
    Type value_of(const Argument& argument) {
        if constexpr (std::is_reference_v<Type>) {
            return *value_of<std::remove_reference_t<Type>*>(argument);
        } else if constexpr (std::is_floating_point_v<Type>) {
            return static_cast<Type>(std::bit_cast<double>(argument.first));
        } else if constexpr (!std::is_pointer_v<Type>) {
            return static_cast<Type>(argument.first);
        } else if (argument.kind == in_blob) {
            return reinterpret_cast<Type>(blobs[argument.first].data() + argument.second);
        } else if (argument.first == 0) {
            return std::is_same_v<Type, specens_workspace*> ? reinterpret_cast<Type>(workspace) : nullptr;
        } else {
            return reinterpret_cast<Type>(handles.at(argument.first));
        }
    }
    template <typename Result, typename... Types>
    void call(Result (*function)(Types...), const std::vector<Argument>& arguments) {
        const auto called = [&]<size_t... index>(std::index_sequence<index...>) {
            return function(value_of<Types>(arguments.at(index))...);
        };
        constexpr auto all = std::index_sequence_for<Types...>();
        result.clear();
        if constexpr (std::is_void_v<Result>) {
            called(all);
        } else {
            const Result returned = called(all);
            result.assign(reinterpret_cast<const char*>(&returned), reinterpret_cast<const char*>(&returned + 1));
        }
        message = specens_last_error();
    }
};

using Function = std::function<void(Caller&, const std::vector<Argument>&)>;

template <typename Result, typename... Types>
void add(std::vector<Function>& functions, Result (*function)(Types...)) {
    functions.emplace_back([=](Caller& caller, const auto& arguments) { caller.call(function, arguments); });
}

template <typename Result, typename... Rest>
void add(std::vector<Function>& functions, const specens::LogitFunction<Result, Rest...>& of_types) {
    for (auto function : of_types.of_type) {
        add(functions, function);
    }
}

// In the client's order, which writes the list.
std::vector<Function> all_functions() {
    std::vector<Function> functions;
#define SPECENS_FUNCTION(name) add(functions, name);
#define SPECENS_ROW_KERNEL(name) add(functions, specens::row_kernels().name);
#include "functions.inc"
    return functions;
}

void read_exactly(void* to, size_t size) {
    if (size > 0 && std::fread(to, 1, size, stdin) != size) {
        std::_Exit(0);  // the client has gone
    }
}

template <typename Number>
std::vector<Number> read_numbers(size_t count) {
    std::vector<Number> numbers(count);
    read_exactly(numbers.data(), count * sizeof(Number));
    return numbers;
}

Request read_request() {
    const auto head = read_numbers<int64_t>(4);
    Request request{head[0], {}, {}, {}, {}};
    const auto sizes_and_kinds = read_numbers<int64_t>(2 * head[1]);
    for (int64_t blob = 0; blob < head[1]; ++blob) {
        request.kinds.push_back(sizes_and_kinds[2 * blob + 1]);
        request.blobs.push_back(read_numbers<char>(sizes_and_kinds[2 * blob]));
    }
    request.pointers = read_numbers<Pointer>(head[2]);
    request.arguments = read_numbers<Argument>(head[3]);
    return request;
}

void write_bytes(const void* bytes, size_t size) {
    const auto length = static_cast<int64_t>(size);
    std::fwrite(&length, sizeof(length), 1, stdout);
    std::fwrite(bytes, 1, size, stdout);
}

// The first caller's handles are what the client knows; the others keep theirs under the same names.
std::string settle(const Request& request, std::vector<Caller>& callers) {
    for (Caller& caller : callers) {
        for (size_t blob = 0; blob < caller.blobs.size(); ++blob) {
            const Bytes &own = caller.blobs[blob], &first = callers[0].blobs[blob];
            if (request.kinds[blob] == of_handle) {
                int64_t name;
                std::memcpy(&name, first.data(), sizeof(name));
                std::memcpy(&caller.handles[name], own.data(), sizeof(void*));
            } else if (request.kinds[blob] == of_data && own != first) {
                return "threads that call at once give different bytes";
            }
        }
        if (caller.message != callers[0].message) {
            return "threads that call at once see different errors: " + caller.message + ", " + callers[0].message;
        }
    }
    return "";
}

void answer(const Request& request, const Caller& first, const std::string& wrong) {
    write_bytes(wrong.data(), wrong.size());
    write_bytes(first.result.data(), first.result.size());
    write_bytes(first.message.data(), first.message.size());
    for (size_t blob = 0; blob < first.blobs.size(); ++blob) {
        if (request.kinds[blob] != of_structs) {
            write_bytes(first.blobs[blob].data(), first.blobs[blob].size());
        }
    }
    std::fflush(stdout);
}

}  // namespace

int main(int, char** arguments) {
    if (specens_use_instruction_set(arguments[1]) != SPECENS_OK) {
        std::fprintf(stderr, "%s\n", specens_last_error());
        return 1;
    }
    const std::vector<Function> functions = all_functions();
    std::vector<Caller> callers(std::stoul(arguments[2]));
    specens_threads shared = specens_threads_init();
    shared.num_threads = 2;
    shared.run = run_on_threads;
    Request request;
    std::barrier turn(static_cast<std::ptrdiff_t>(callers.size() + 1));
    std::vector<std::thread> threads;
    for (size_t index = 0; index < callers.size(); ++index) {
        if (index % 2 == 1 && specens_workspace_create(&shared, &callers[index].workspace) != SPECENS_OK) {
            return 1;
        }
        threads.emplace_back([&, own = &callers[index]] {
            while (true) {
                turn.arrive_and_wait();
                own->adopt(request);
                functions.at(request.function)(*own, request.arguments);
                turn.arrive_and_wait();
            }
        });
    }
    while (true) {
        request = read_request();
        if (request.function == peek) {
            Caller seen;
            const auto* place = reinterpret_cast<const char*>(request.arguments[0].first);
            seen.result.assign(place, place + request.arguments[1].first);
            answer(request, seen, "");
            continue;
        }
        turn.arrive_and_wait();
        turn.arrive_and_wait();
        answer(request, callers[0], settle(request, callers));
    }
}
