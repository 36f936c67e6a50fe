// A module's shared memory: finding it, and making it undefined before each block. Used by scheduler.cpp only.
#pragma once
#include <cstdint>
#include <cstring>
#include <link.h>
#include <unordered_map>
#include <vector>

struct Range { uintptr_t low, high; };
const int DYNAMIC_GUARD = 256;  // bytes behind the dynamic shared memory that must stay as they are

// It is the block of thread-local storage that belongs to the module. Found once per module and OS thread.
struct Storage
{
    char* memory = nullptr;
    size_t size = 0;
    Range shared{0, 0};
    std::vector<Range> images;  // code and variables of the module and of this file: not the kernel's memory
};
struct Search
{
    const void *anchor, *own;  // an address in the module, and one in this library
    Storage* found;
};
static int look_at_image(dl_phdr_info* image, size_t, void* data)
{
    Search& search = *(Search*)data;
    bool is_module = false;
    size_t size = 0;
    for (int k = 0; k < image->dlpi_phnum; ++k)
    {
        const auto& part = image->dlpi_phdr[k];
        const uintptr_t low = image->dlpi_addr + part.p_vaddr;
        const bool module = (uintptr_t)search.anchor - low < part.p_memsz, own = (uintptr_t)search.own - low < part.p_memsz;
        if (part.p_type == PT_LOAD && (module || own)) search.found->images.push_back({low, low + part.p_memsz});
        is_module |= part.p_type == PT_LOAD && module;
        if (part.p_type == PT_TLS) size = part.p_memsz;
    }
    if (is_module && size) search.found->memory = (char*)image->dlpi_tls_data, search.found->size = size;
    return 0;
}
static Storage& storage_of(const void* anchor, const void* own)
{
    static thread_local std::unordered_map<const void*, Storage> known;
    Storage& storage = known[anchor];
    if (!storage.memory)
    {
        Search search{anchor, own, &storage};
        dl_iterate_phdr(look_at_image, &search);
        storage.shared = {(uintptr_t)storage.memory, (uintptr_t)storage.memory + storage.size};
    }
    return storage;
}
// Fills what a launch can use of the shared memory: unwritten shared memory is NaN. `dynamic` ends with a null pointer.
static void refill(const Storage& storage, unsigned dynamic_bytes, void** dynamic, size_t dynamic_size)
{
    char* at = storage.memory;
    char* const end = at + storage.size;
    while (at < end)
    {
        char* array = end;  // the next dynamic array in memory; of it only the part that the launch asked for
        for (void** d = dynamic; *d; ++d)
            if ((char*)*d >= at && (char*)*d < array) array = (char*)*d;
        memset(at, 0xff, array - at);
        if (array == end) return;
        memset(array, 0xff, dynamic_bytes + DYNAMIC_GUARD);
        at = array + dynamic_size;
    }
}
// Whether a block left what lies behind its dynamic shared memory alone.
static bool guard_is_whole(unsigned dynamic_bytes, void** dynamic)
{
    for (void** d = dynamic; *d; ++d)
        for (int i = 0; i < DYNAMIC_GUARD; ++i)
            if (((unsigned char*)*d)[dynamic_bytes + i] != 0xff) return false;
    return true;
}
