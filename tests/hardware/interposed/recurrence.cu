// Large and small allocations that change in every step, by launches, a captured graph and copies; a line of sums a step.
//
//     recurrence MIB STEPS PAUSE_US

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
#include <vector>

namespace {

void check(cudaError_t result, const char* what) {
    if (result != cudaSuccess) {
        std::fprintf(stderr, "%s: %s (%d)\n", what, cudaGetErrorString(result), static_cast<int>(result));
        std::exit(1);
    }
}
#define CHECK(call) check((call), #call)

__global__ void seed(uint64_t* values, size_t count, uint64_t start) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        values[i] = start + 0x9E3779B97F4A7C15ull * (i + 1);
}

__global__ void advance(uint64_t* values, size_t count) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        values[i] = values[i] * 6364136223846793005ull + 1442695040888963407ull;
}

__global__ void add_up(const uint64_t* values, size_t count, unsigned long long* sum) {
    uint64_t mine = 0;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        mine += values[i];
    atomicAdd(sum, static_cast<unsigned long long>(mine));
}

}  // namespace

int main(int argc, char** argv) {
    const size_t mib = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1024;
    const int steps = argc > 2 ? std::atoi(argv[2]) : 200, pause_us = argc > 3 ? std::atoi(argv[3]) : 20000;
    const size_t large = (mib << 20) / sizeof(uint64_t), medium = (5 << 20) / sizeof(uint64_t), small = 1000;
    uint64_t *values[3], *churn = nullptr;
    unsigned long long* sum;
    const size_t counts[] = {large, medium, small};
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&sum, sizeof *sum));
    for (int i = 0; i < 3; i++) {
        CHECK(cudaMalloc(&values[i], counts[i] * sizeof(uint64_t)));
        seed<<<264, 256, 0, stream>>>(values[i], counts[i], i);
        cudaPointerAttributes attributes;
        CHECK(cudaPointerGetAttributes(&attributes, values[i]));
        if (attributes.type != cudaMemoryTypeDevice)
            check(cudaErrorInvalidValue, "pointer attributes");
    }
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < 3; i++)
        advance<<<264, 256, 0, stream>>>(values[i], counts[i]);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int step = 0; step < steps; step++) {
        unsigned long long told = 0;
        CHECK(cudaGraphLaunch(executable, stream));
        if (step % 3 == 0) {  // what comes and goes
            if (churn != nullptr)
                CHECK(cudaFree(churn));
            CHECK(cudaMalloc(&churn, (size_t(3 + step % 7) << 20)));
            CHECK(cudaMemcpyAsync(churn, values[1], 3 << 20, cudaMemcpyDeviceToDevice, stream));
            CHECK(cudaMemcpyAsync(values[1], churn, 1 << 20, cudaMemcpyDeviceToDevice, stream));
        }
        CHECK(cudaMemsetAsync(sum, 0, sizeof *sum, stream));
        for (int i = 0; i < 3; i++)
            add_up<<<264, 256, 0, stream>>>(values[i], counts[i], sum);
        CHECK(cudaMemcpyAsync(&told, sum, sizeof told, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        std::printf("%d %llu\n", step, told);
        std::fflush(stdout);
        usleep(pause_us);
    }
    return 0;
}
