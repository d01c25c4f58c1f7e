// An exception leaves a driver call through its callback; the thread lives on.
#include <cstdio>
#include <dlfcn.h>

static void throw_it(void *) { throw 5; }

int main() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
    auto call = reinterpret_cast<int (*)(void (*)(void *), void *)>(dlsym(library, "cuTestCall"));
    init(0);
    try {
        call(throw_it, nullptr);
    } catch (int caught) {
        std::puts(caught == 5 ? "ready" : "other");
        std::fflush(stdout);
    }
    return std::getchar() == EOF;
}
