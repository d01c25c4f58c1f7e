// Three streams, events between them, and a captured graph that is launched anew in each step.
//
// Every value is an integer, or a float whose bits are summed as integers: the sums are taken modulo 2^64, so they
// do not depend on the order in which threads add, and a run gives the same lines each time.

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

namespace {

constexpr int kElements = 1 << 22;
constexpr int kThreads = 256;
constexpr int kBlocks = kElements / kThreads;

void check(cudaError_t result, const char* what) {
    if (result != cudaSuccess) {
        std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
        std::exit(1);
    }
}
#define CHECK(call) check((call), #call)

__global__ void seed(uint64_t* integers, float* floats) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    integers[i] = 0x9E3779B97F4A7C15ull * (i + 1);
    floats[i] = static_cast<float>(i % 1000) / 1000.0f;
}

__global__ void advance_integers(uint64_t* integers) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    integers[i] = integers[i] * 6364136223846793005ull + 1442695040888963407ull;
}

__global__ void advance_floats(float* floats) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const float x = floats[i];
    floats[i] = 3.9f * x * (1.0f - x);
}

// sums[0] += the integers, sums[1] += the bits of the floats.
__global__ void add_up(const uint64_t* integers, const float* floats, unsigned long long* sums) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&sums[0], static_cast<unsigned long long>(integers[i]));
    atomicAdd(&sums[1], static_cast<unsigned long long>(__float_as_uint(floats[i])));
}

struct Options {
    int steps = 100;
    const char* out = nullptr;
    double pace_s = 0.0;
};

Options parse(int argc, char** argv) {
    Options options;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!std::strcmp(argv[i], "--steps")) options.steps = std::atoi(argv[i + 1]);
        else if (!std::strcmp(argv[i], "--out")) options.out = argv[i + 1];
        else if (!std::strcmp(argv[i], "--pace")) options.pace_s = std::atof(argv[i + 1]);
        else options.out = nullptr;
    }
    if (!options.out) {
        std::fprintf(stderr, "usage: %s --out FILE [--steps N] [--pace S]\n", argv[0]);
        std::exit(2);
    }
    return options;
}

// The file is open only while a line is written: one that stays open and grows makes CRIU refuse a later restore.
void note(const char* path, int step, const unsigned long long* sums) {
    std::FILE* out = std::fopen(path, "a");
    if (!out || std::fprintf(out, "%d %llu %llu\n", step, sums[0], sums[1]) < 0 || std::fclose(out) != 0) {
        std::perror(path);
        std::exit(1);
    }
}

// Integers and floats advance side by side in two streams; the sums wait for both.
cudaGraphExec_t capture(cudaStream_t main, cudaStream_t side, uint64_t* integers, float* floats,
                        unsigned long long* sums) {
    cudaEvent_t forked, joined;
    CHECK(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));
    CHECK(cudaStreamBeginCapture(main, cudaStreamCaptureModeGlobal));
    CHECK(cudaMemsetAsync(sums, 0, 2 * sizeof *sums, main));
    CHECK(cudaEventRecord(forked, main));
    CHECK(cudaStreamWaitEvent(side, forked, 0));
    advance_integers<<<kBlocks, kThreads, 0, main>>>(integers);
    advance_floats<<<kBlocks, kThreads, 0, side>>>(floats);
    CHECK(cudaEventRecord(joined, side));
    CHECK(cudaStreamWaitEvent(main, joined, 0));
    add_up<<<kBlocks, kThreads, 0, main>>>(integers, floats, sums);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(main, &graph));
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    return exec;
}

}  // namespace

int main(int argc, char** argv) {
    const Options options = parse(argc, argv);
    cudaStream_t main_stream, side_stream, copy_stream;
    for (cudaStream_t* stream : {&main_stream, &side_stream, &copy_stream})
        CHECK(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    uint64_t* integers;
    float* floats;
    unsigned long long *sums, *host_sums;
    CHECK(cudaMalloc(&integers, kElements * sizeof *integers));
    CHECK(cudaMalloc(&floats, kElements * sizeof *floats));
    CHECK(cudaMalloc(&sums, 2 * sizeof *sums));
    CHECK(cudaMallocHost(&host_sums, 2 * sizeof *host_sums));
    seed<<<kBlocks, kThreads, 0, main_stream>>>(integers, floats);
    CHECK(cudaStreamSynchronize(main_stream));
    cudaGraphExec_t graph = capture(main_stream, side_stream, integers, floats, sums);
    cudaEvent_t computed, copied;
    CHECK(cudaEventCreateWithFlags(&computed, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming));

    for (int step = 0; step < options.steps; ++step) {
        CHECK(cudaGraphLaunch(graph, main_stream));
        CHECK(cudaEventRecord(computed, main_stream));
        CHECK(cudaStreamWaitEvent(copy_stream, computed, 0));
        CHECK(cudaMemcpyAsync(host_sums, sums, 2 * sizeof *sums, cudaMemcpyDeviceToHost, copy_stream));
        CHECK(cudaEventRecord(copied, copy_stream));
        CHECK(cudaEventSynchronize(copied));
        note(options.out, step, host_sums);
        if (step == 0) {
            std::puts("ready");
            std::fflush(stdout);
        }
        usleep(static_cast<useconds_t>(options.pace_s * 1e6));
    }
    return 0;
}
