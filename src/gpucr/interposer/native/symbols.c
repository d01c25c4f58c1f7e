/*
 * How a program gets the driver's functions: dlsym, dlvsym, cuGetProcAddress, or linking with libcuda. In each case it
 * gets a stub of the gate.
 */
#include "replaced.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <setjmp.h>
#include <string.h>

#define LIBRARY "libcuda.so.1"

struct driver real;

#define NAME(function) {.name = #function},
struct slot gate_slots[] = {
#include "names.inc"
    [sizeof((struct slot[]){
#include "names.inc"
     }) / sizeof(struct slot) + FREE_STUBS - 1] = {.name = NULL}};
#undef NAME
_Static_assert(sizeof(struct slot) == SLOT_BYTES, "the stubs count in SLOT_BYTES");
#define STUB_BYTES 16
#define SLOTS (sizeof gate_slots / sizeof *gate_slots)
#define NAMED (SLOTS - FREE_STUBS)

extern char gate_named_stubs[], gate_free_stubs[];
__attribute__((visibility("hidden"))) void *(*real_dlsym)(void *, const char *);
extern __attribute__((visibility("hidden"))) void (*real_longjmp)(struct __jmp_buf_tag *, int);
__attribute__((visibility("hidden"))) void *(*real_dlvsym)(void *, const char *, const char *);
__attribute__((visibility("hidden"))) void *(*real_dlopen)(const char *, int);
__attribute__((visibility("hidden"))) void *(*real_dlmopen)(Lmid_t, const char *, int);

static pthread_once_t look_up_once = PTHREAD_ONCE_INIT;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static size_t stubs_taken;
static void *_Atomic library; /* libcuda; NULL: not loaded, or not looked at yet */
static bool complete;

/* --- the C library's own dlsym, which cannot be looked up with dlsym ------------------------------------------------
   */

struct tables {
    const ElfW(Sym) *symbols;
    const char *names;
    const uint32_t *hash; /* GNU's */
};

static uint32_t symbol_count(const uint32_t *hash) {
    uint32_t buckets = hash[0], first = hash[1], bloom = hash[2], last = 0;
    const uint32_t *bucket = (const uint32_t *)((const ElfW(Addr) *)(hash + 4) + bloom), *chain = bucket + buckets;
    for (uint32_t i = 0; i < buckets; i++)
        if (bucket[i] > last)
            last = bucket[i];
    if (last < first)
        return first;
    while ((chain[last - first] & 1) == 0)
        last++;
    return last + 1;
}

static bool find_tables(const struct dl_phdr_info *info, struct tables *tables) {
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_DYNAMIC)
            continue;
        const ElfW(Dyn) *entry = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
        for (; entry->d_tag != DT_NULL; entry++) { /* glibc has made addresses of them */
            if (entry->d_tag == DT_SYMTAB)
                tables->symbols = (const ElfW(Sym) *)entry->d_un.d_ptr;
            else if (entry->d_tag == DT_STRTAB)
                tables->names = (const char *)entry->d_un.d_ptr;
            else if (entry->d_tag == DT_GNU_HASH)
                tables->hash = (const uint32_t *)entry->d_un.d_ptr;
        }
    }
    return tables->symbols != NULL && tables->names != NULL && tables->hash != NULL;
}

static int find_in_object(struct dl_phdr_info *info, size_t size, void *unused) {
    struct tables tables = {0};
    const char *file = strrchr(info->dlpi_name, '/');
    (void)size, (void)unused;
    if (file == NULL || (strncmp(file, "/libc.so.", 9) != 0 && strncmp(file, "/libdl.so.", 10) != 0) ||
        !find_tables(info, &tables))
        return 0;
    uint32_t count = symbol_count(tables.hash);
    for (uint32_t i = 0; i < count; i++) {
        const ElfW(Sym) *symbol = &tables.symbols[i];
        if (symbol->st_shndx == SHN_UNDEF || symbol->st_value == 0)
            continue;
        const char *name = tables.names + symbol->st_name;
        if (strcmp(name, "dlsym") == 0)
            real_dlsym = (void *(*)(void *, const char *))(info->dlpi_addr + symbol->st_value);
        else if (strcmp(name, "dlvsym") == 0)
            real_dlvsym = (void *(*)(void *, const char *, const char *))(info->dlpi_addr + symbol->st_value);
        else if (strcmp(name, "dlopen") == 0)
            real_dlopen = (void *(*)(const char *, int))(info->dlpi_addr + symbol->st_value);
        else if (strcmp(name, "dlmopen") == 0)
            real_dlmopen = (void *(*)(Lmid_t, const char *, int))(info->dlpi_addr + symbol->st_value);
        else if (strcmp(name, "siglongjmp") == 0)
            real_longjmp = (void (*)(struct __jmp_buf_tag *, int))(info->dlpi_addr + symbol->st_value);
    }
    return real_dlsym != NULL && real_dlvsym != NULL && real_dlopen != NULL && real_dlmopen != NULL && real_longjmp != NULL;
}

static void look_up(void) {
    dl_iterate_phdr(find_in_object, NULL);
}

void symbols_find_libc(void) {
    pthread_once(&look_up_once, look_up);
}

/* --- what takes a function's place ---------------------------------------------------------------------------------- */

#define BY_ADDRESS
#define REPLACED(base, exported) {#base, #exported, (void *)replaced_##exported, NULL},
static struct replacement {
    const char *base, *exported;
    void *ours, *theirs;
} replacements[] = {REPLACEMENTS(REPLACED)};
#define REPLACED_COUNT (sizeof replacements / sizeof *replacements)

static result get_proc_address(const char *name, void **function, int version, uint64_t flags);
static result get_proc_address_v2(const char *name, void **function, int version, uint64_t flags, int *status);

/* `base`: the name under which cuGetProcAddress gave it, or NULL. */
static void *replacement(void *theirs, const char *base) {
    if (!complete)
        return theirs;
    for (size_t i = 0; i < REPLACED_COUNT; i++)
        if (replacements[i].theirs == theirs)
            return replacements[i].ours;
    for (size_t i = 0; base != NULL && i < REPLACED_COUNT; i++)
        if (strcmp(replacements[i].base, base) == 0 && replacements[i].theirs != NULL)
            return replacements[i].ours;
    return theirs;
}

static void load(void *loaded) {
    complete = true;
#define LOAD(name, parameters) real.name = (result(*) parameters)real_dlsym(loaded, #name);
#define REQUIRE(name, parameters) complete = complete && real.name != NULL;
    NEEDED(LOAD) OPTIONAL(LOAD) NEEDED(REQUIRE)
    for (size_t i = 0; i < REPLACED_COUNT; i++)
        replacements[i].theirs = real_dlsym(loaded, replacements[i].exported);
}

/* Early, and once: at a freeze the loader's lock may be held. The reference keeps libcuda from being unloaded. */
static void *libcuda(void) {
    void *handle = atomic_load(&library);
    if (handle != NULL)
        return handle;
    handle = dlopen(LIBRARY, RTLD_LAZY | RTLD_NOLOAD);
    if (handle == NULL)
        return NULL;
    pthread_mutex_lock(&mutex);
    if (atomic_load(&library) == NULL) {
        load(handle);
        atomic_store(&library, handle);
    }
    pthread_mutex_unlock(&mutex);
    return handle;
}

void symbols_in_child(void) {
    pthread_mutex_init(&mutex, NULL);
}

bool symbols_complete(void) {
    return complete;
}

/* --- stubs ---------------------------------------------------------------------------------------------------------- */

static bool begins(const char *name, const char *beginning) {
    return strncmp(name, beginning, strlen(beginning)) == 0;
}

static const struct {
    const char *beginning;
    enum role role;
    int counter, delta;
} ROLES[] = {
    {"cuInit", STARTS_CUDA, 0, 0},
    {"cuStreamBeginCapture", BEGINS_CAPTURE, 0, 0},
    {"cuStreamEndCapture", ENDS_CAPTURE, 0, 0},
    {"cuStreamDestroy", DESTROYS_STREAM, 0, 0},
    {"cuCtxDestroy", DESTROYS_CONTEXT, 0, 0},
    {"cuDevicePrimaryCtxReset", DESTROYS_PRIMARY, 0, 0},
    {"cuDevicePrimaryCtxRelease", DESTROYS_PRIMARY, 0, 0},
    {"cuArrayCreate", COUNTED, ARRAYS, 1},
    {"cuArray3DCreate", COUNTED, ARRAYS, 1},
    {"cuMipmappedArrayCreate", COUNTED, ARRAYS, 1},
    {"cuArrayDestroy", COUNTED, ARRAYS, -1},
    {"cuMipmappedArrayDestroy", COUNTED, ARRAYS, -1},
    {"cuMemPoolCreate", COUNTED, POOLS, 1},
    {"cuMemPoolDestroy", COUNTED, POOLS, -1},
    {"cuMemAllocAsync", COUNTED, POOL_ALLOCATIONS, 1},
    {"cuMemAllocFromPoolAsync", COUNTED, POOL_ALLOCATIONS, 1},
    {"cuIpcOpenEventHandle", COUNTED, IPC_EVENTS, 1},
    {"cuIpcGetEventHandle", COUNTED, IPC_EVENTS, 1},
    {"cuCtxEnablePeerAccess", COUNTED, PEER_ACCESS, 1},
    {"cuCtxDisablePeerAccess", COUNTED, PEER_ACCESS, -1},
    {"cuImportExternalMemory", COUNTED, EXTERNAL, 1},
    {"cuDestroyExternalMemory", COUNTED, EXTERNAL, -1},
};

void symbols_describe(struct slot *slot) {
    for (size_t i = 0; i < sizeof ROLES / sizeof *ROLES; i++)
        if (begins(slot->name, ROLES[i].beginning)) {
            slot->role = ROLES[i].role;
            slot->counter = ROLES[i].counter;
            slot->delta = ROLES[i].delta;
            return;
        }
    if ((begins(slot->name, "cuMemcpy") || begins(slot->name, "cuMemset")) && strstr(slot->name, "Async") == NULL)
        slot->role = COPIES;
}

static result missing(void) {
    return NOT_FOUND;
}

void *symbols_resolve(struct slot *slot) {
    void *handle = libcuda();
    void *theirs = handle != NULL ? real_dlsym(handle, slot->name) : NULL;
    symbols_describe(slot);
    void *target = theirs != NULL ? replacement(theirs, NULL) : (void *)missing;
    if (theirs != NULL)
        atomic_store_explicit(&slot->target, target, memory_order_release);
    return target;
}

/* The stub for a function that was looked up; the function itself if no stub is left. */
static void *gated(const char *name, void *target) {
    void *stub = target;
    pthread_mutex_lock(&mutex);
    size_t number = NAMED;
    while (number < NAMED + stubs_taken && atomic_load(&gate_slots[number].target) != target)
        number++;
    if (number == NAMED + stubs_taken && stubs_taken < FREE_STUBS) {
        gate_slots[number].name = strdup(name);
        if (gate_slots[number].name != NULL) {
            symbols_describe(&gate_slots[number]);
            atomic_store(&gate_slots[number].target, target);
            stubs_taken++;
        }
    }
    if (number < NAMED + stubs_taken)
        stub = gate_free_stubs + (number - NAMED) * STUB_BYTES;
    pthread_mutex_unlock(&mutex);
    return stub;
}

/* Functions that act on other processes, or return functions themselves. */
static bool stays_open(const char *name) {
    return begins(name, "cuCheckpointProcess") || begins(name, "cuGetExportTable");
}

static void *in_place_of(const char *name, void *theirs, const char *base) {
    if (theirs == (void *)real.cuGetProcAddress_v2)
        return (void *)get_proc_address_v2;
    if (theirs == (void *)real.cuGetProcAddress)
        return (void *)get_proc_address;
    return stays_open(name) ? theirs : gated(name, replacement(theirs, base));
}

/* --- look-ups of the program ------------------------------------------------------------------------------------------ */

/* Under any name by which it was loaded first: numba's is libcuda.so. A copy in another namespace has the usual one. */
static bool of_libcuda(const void *function) {
    struct link_map *object = NULL, *driver = NULL;
    Dl_info info;
    if (dladdr1(function, &info, (void **)&object, RTLD_DL_LINKMAP) == 0 || info.dli_fname == NULL)
        return false;
    void *handle = libcuda();
    if (handle != NULL && dlinfo(handle, RTLD_DI_LINKMAP, &driver) == 0 && driver == object)
        return true;
    const char *file = strrchr(info.dli_fname, '/');
    return begins(file != NULL ? file + 1 : info.dli_fname, "libcuda.so.");
}

static bool is_candidate(void *handle, const char *name) {
    symbols_find_libc();
    return name != NULL && name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z' && handle != RTLD_NEXT &&
           handle != RTLD_DEFAULT;
}

static void *stub_for(const char *name, void *theirs) {
    return theirs != NULL && of_libcuda(theirs) && libcuda() != NULL ? in_place_of(name, theirs, NULL) : NULL;
}

/* NULL: let the C library's own answer. */
void *symbols_dlsym(void *handle, const char *name) {
    if (name != NULL && name[0] == 'c' && name[1] == 'l')
        return opencl_dlsym(handle, name);
    return is_candidate(handle, name) ? stub_for(name, real_dlsym(handle, name)) : NULL;
}

void *symbols_dlvsym(void *handle, const char *name, const char *version) {
    return is_candidate(handle, name) ? stub_for(name, real_dlvsym(handle, name, version)) : NULL;
}

/*
 * A library loaded into another namespace, or one that prefers its own symbols, finds the C library's dlsym before this
 * one, and so reaches the driver around the gate. Whether it does is unknown; NULL: let the C library's own load it.
 */
void *symbols_dlopen(const char *name, int flags) {
    symbols_find_libc();
    if (name != NULL && (flags & RTLD_DEEPBIND) != 0)
        atomic_fetch_add(&counters[AROUND], 1);
    return NULL;
}

void *symbols_dlmopen(Lmid_t namespace, const char *name, int flags) {
    if (namespace != LM_ID_BASE)
        flags |= RTLD_DEEPBIND;
    return symbols_dlopen(name, flags);
}

static void replace_found(const char *name, void **function, int version) {
    if (function == NULL || *function == NULL)
        return;
    if (strcmp(name, "cuGetProcAddress") == 0)
        *function = version >= 12000 ? (void *)get_proc_address_v2 : (void *)get_proc_address;
    else
        *function = in_place_of(name, *function, name);
}

static result get_proc_address_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    result result = real.cuGetProcAddress_v2(name, function, version, flags, status);
    if (result == SUCCESS)
        replace_found(name, function, version);
    return result;
}

static result get_proc_address(const char *name, void **function, int version, uint64_t flags) {
    result result = real.cuGetProcAddress(name, function, version, flags);
    if (result == SUCCESS)
        replace_found(name, function, version);
    return result;
}

/* For programs that are linked with libcuda. */
#define EXPORT __attribute__((visibility("default")))

EXPORT result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    return libcuda() != NULL ? get_proc_address_v2(name, function, version, flags, status) : NOT_INITIALIZED;
}

EXPORT result cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return libcuda() != NULL ? get_proc_address(name, function, version, flags) : NOT_INITIALIZED;
}
