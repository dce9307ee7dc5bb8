// NCCL: messages that move real bytes between ranks, through files in $STANDIN_MESSAGES.
//
// As on GPUs, a message is a step of a stream: it ends when all its ranks have come to it, and the host goes on. A send
// ends when it was received. Ranks that call different collectives of a communicator, or with other sizes, are refused,
// where NCCL would hang or mix up their numbers.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "machine.hh"

namespace {

enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT };
enum Op { SUM, PRODUCT, MAX, MIN, MEAN };
constexpr size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

struct Communicator {
  std::string id;
  int ranks, rank;
  uint64_t collectives = 0, ended = 0;  // as NCCL's they run one after another, whatever streams they are on
  std::map<std::pair<int, int>, uint64_t> messages;  // by sender and receiver
};

size_t largest() {  // beyond it ranks only meet, and no bytes move
  const char* text = getenv("STANDIN_LARGEST");
  return text ? strtoull(text, nullptr, 10) : size_t(64) << 20;
}

std::string path(const std::string& name) { return std::string(getenv("STANDIN_MESSAGES")) + "/" + name; }

struct Note {  // what a message says of itself
  char call[16];
  uint64_t count;
  int32_t type, op;
};

void put(const std::string& name, const Note& note, const void* data, size_t size) {
  std::string to = path(name), draft = to + "+";
  FILE* file = fopen(draft.c_str(), "w");
  if (!file) perror(draft.c_str()), abort();
  fwrite(&note, sizeof note, 1, file);
  fwrite(data, 1, size <= largest() ? size : 0, file);
  fclose(file);
  rename(draft.c_str(), to.c_str());
}

bool there(const std::string& name) { return access(path(name).c_str(), F_OK) == 0; }

std::vector<char> get(const std::string& name, const Note& expected) {
  FILE* file = fopen(path(name).c_str(), "r");
  Note note;
  if (!file || fread(&note, sizeof note, 1, file) != 1) perror(name.c_str()), abort();
  if (memcmp(&note, &expected, sizeof note)) {
    fprintf(stderr, "ranks disagree: %s of %zu (type %d, op %d) here, %s of %zu (type %d, op %d) there\n", expected.call,
            size_t(expected.count), expected.type, expected.op, note.call, size_t(note.count), note.type, note.op);
    fflush(stderr), abort();
  }
  struct stat found;
  fstat(fileno(file), &found);
  std::vector<char> data(found.st_size - sizeof note);
  if (fread(data.data(), 1, data.size(), file) != data.size()) perror(name.c_str()), abort();
  fclose(file);
  return data;
}

double wide(const char* at, int type) {
  switch (type) {
    case INT8: return *reinterpret_cast<const int8_t*>(at);
    case UINT8: return *reinterpret_cast<const uint8_t*>(at);
    case INT32: return *reinterpret_cast<const int32_t*>(at);
    case UINT32: return *reinterpret_cast<const uint32_t*>(at);
    case FLOAT: return *reinterpret_cast<const float*>(at);
    case DOUBLE: return *reinterpret_cast<const double*>(at);
    case INT64: return double(*reinterpret_cast<const int64_t*>(at));
    case UINT64: return double(*reinterpret_cast<const uint64_t*>(at));
    case BFLOAT: {
      uint32_t bits = uint32_t(*reinterpret_cast<const uint16_t*>(at)) << 16;
      return *reinterpret_cast<float*>(&bits);
    }
    default: return double(float(*reinterpret_cast<const _Float16*>(at)));
  }
}

void narrow(char* at, int type, double value) {
  switch (type) {
    case INT8: *reinterpret_cast<int8_t*>(at) = int8_t(value); break;
    case UINT8: *reinterpret_cast<uint8_t*>(at) = uint8_t(value); break;
    case INT32: *reinterpret_cast<int32_t*>(at) = int32_t(value); break;
    case UINT32: *reinterpret_cast<uint32_t*>(at) = uint32_t(value); break;
    case FLOAT: *reinterpret_cast<float*>(at) = float(value); break;
    case DOUBLE: *reinterpret_cast<double*>(at) = value; break;
    case INT64: *reinterpret_cast<int64_t*>(at) = int64_t(value); break;
    case UINT64: *reinterpret_cast<uint64_t*>(at) = uint64_t(value); break;
    case BFLOAT: {
      float single = float(value);
      uint32_t bits = *reinterpret_cast<uint32_t*>(&single);
      *reinterpret_cast<uint16_t*>(at) = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
      break;
    }
    default: *reinterpret_cast<_Float16*>(at) = _Float16(float(value));
  }
}

double joined(double a, double b, int op) {
  return op == PRODUCT ? a * b : op == MAX ? std::max(a, b) : op == MIN ? std::min(a, b) : a + b;
}

// All ranks' numbers, `count` of each from place `first` on, joined into `to`.
void reduce(const std::vector<std::vector<char>>& all, char* to, size_t first, size_t count, int type, int op) {
  size_t size = SIZES[type];
  for (size_t index = 0; index < count; index++) {
    double value = wide(all[0].data() + (first + index) * size, type);
    for (size_t rank = 1; rank < all.size(); rank++)
      value = joined(value, wide(all[rank].data() + (first + index) * size, type), op);
    narrow(to + index * size, type, op == MEAN ? value / all.size() : value);
  }
}

using Combine = std::function<void(const std::vector<std::vector<char>>&)>;

// Steps of a group of calls begin together: where one waits for another rank, the others go on.
thread_local int open_groups = 0;
thread_local std::vector<std::pair<cudaStream_t, machine::Step>> grouped;

void begin(cudaStream_t stream, machine::Step step) {
  if (open_groups)
    grouped.emplace_back(stream, std::move(step));
  else
    machine::submit(stream, std::move(step));
}

struct Buffer {
  const void* start;
  uint64_t count;  // of numbers
};

void log(const char* call, Communicator* own, uint64_t count, int type, int peer, cudaStream_t stream, Buffer reads,
         Buffer writes) {
  machine::log("N %d %p %s %zu %zu ranks %d rank %d peer %d comm %s reads %p %zu writes %p %zu", machine::device(), stream,
               call, size_t(count), size_t(count * SIZES[type]), own->ranks, own->rank, peer, own->id.c_str(), reads.start,
               size_t(reads.count * SIZES[type]), writes.start, size_t(writes.count * SIZES[type]));
}

// What this rank gives, `count` numbers of it, where it gets some, and what it does with what all have given.
int collective(const char* call, void* communicator, const void* given, uint64_t count, Buffer gets, int type, int op,
               cudaStream_t stream, Combine combine) {
  auto* own = static_cast<Communicator*>(communicator);
  bool dealt = !strcmp(call, "reduce_scatter") || !strcmp(call, "all_to_all");
  int root = strcmp(call, "broadcast") ? -1 : op;
  log(call, own, dealt ? count / own->ranks : count, type, root, stream, {given, count}, gets);
  uint64_t turn = own->collectives++;
  Note note = {{}, count, type, op};
  strncpy(note.call, call, sizeof note.call - 1);
  auto sent = std::make_shared<bool>(false);
  begin(stream, [=] {
    if (own->ended != turn) return false;
    std::string name = own->id + "." + std::to_string(turn) + ".";
    if (!*sent) put(name + std::to_string(own->rank), note, given, count * SIZES[type]), *sent = true;
    for (int rank = 0; rank < own->ranks; rank++)
      if (!there(name + std::to_string(rank))) return false;
    std::vector<std::vector<char>> all;
    for (int rank = 0; rank < own->ranks; rank++) all.push_back(get(name + std::to_string(rank), note));
    if (all[0].size() == count * SIZES[type]) combine(all);
    if (turn)  // who has come here has taken what came before
      unlink(path(own->id + "." + std::to_string(turn - 1) + "." + std::to_string(own->rank)).c_str());
    return own->ended++, true;
  });
  return 0;
}

int initialise(void** communicator, const std::string& id, int ranks, int rank) {
  *communicator = new Communicator{id, ranks, rank};
  machine::log("I %d %s ranks %d rank %d", machine::device(), id.c_str(), ranks, rank);
  return 0;
}

}  // namespace

extern "C" {

struct Id {
  char text[128];
};

int ncclGetVersion(int* version) { return *version = 22907, 0; }
int ncclGetUniqueId(Id* id) {
  *id = {};
  return snprintf(id->text, sizeof id->text, "%d-%zx", getpid(), size_t(machine::unique())), 0;
}
int ncclCommInitRank(void** communicator, int ranks, Id id, int rank) { return initialise(communicator, id.text, ranks, rank); }
int ncclCommInitRankConfig(void** communicator, int ranks, Id id, int rank, void*) {
  return initialise(communicator, id.text, ranks, rank);
}
int ncclCommInitRankScalable(void** communicator, int ranks, int rank, int, Id* ids, void*) {
  return initialise(communicator, ids->text, ranks, rank);
}
int ncclCommCount(void* own, int* ranks) { return *ranks = static_cast<Communicator*>(own)->ranks, 0; }
int ncclCommUserRank(void* own, int* rank) { return *rank = static_cast<Communicator*>(own)->rank, 0; }
int ncclCommGetAsyncError(void*, int* error) { return *error = 0, 0; }
const char* ncclGetErrorString(int) { return "refused by the stand-in for NCCL"; }
const char* ncclGetLastError(void*) { return ""; }

int ncclGroupStart() { return open_groups++, 0; }
int ncclGroupEnd() {
  if (--open_groups) return 0;
  std::map<cudaStream_t, std::vector<machine::Step>> by_stream;
  for (auto& [stream, step] : grouped) by_stream[stream].push_back(std::move(step));
  grouped.clear();
  for (auto& [stream, steps] : by_stream) {
    auto left = std::make_shared<std::vector<machine::Step>>(std::move(steps));
    machine::submit(stream, [left] {
      left->erase(std::remove_if(left->begin(), left->end(), [](auto& step) { return step(); }), left->end());
      return left->empty();
    });
  }
  return 0;
}

int ncclSend(const void* from, size_t count, int type, int peer, void* communicator, cudaStream_t stream) {
  auto* own = static_cast<Communicator*>(communicator);
  log("send", own, count, type, peer, stream, {from, count}, {});
  uint64_t turn = own->messages[{own->rank, peer}]++;
  std::string name = own->id + ".p." + std::to_string(own->rank) + "." + std::to_string(peer) + "." + std::to_string(turn);
  auto sent = std::make_shared<bool>(false);
  begin(stream, [=] {
    if (!*sent) put(name, {"send", count, type, 0}, from, count * SIZES[type]), *sent = true;
    return !there(name);
  });
  return 0;
}
int ncclRecv(void* to, size_t count, int type, int peer, void* communicator, cudaStream_t stream) {
  auto* own = static_cast<Communicator*>(communicator);
  log("recv", own, count, type, peer, stream, {}, {to, count});
  uint64_t turn = own->messages[{peer, own->rank}]++;
  std::string name = own->id + ".p." + std::to_string(peer) + "." + std::to_string(own->rank) + "." + std::to_string(turn);
  begin(stream, [=] {
    if (!there(name)) return false;
    std::vector<char> data = get(name, {"send", count, type, 0});
    memcpy(to, data.data(), data.size());
    return unlink(path(name).c_str()), true;
  });
  return 0;
}
int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, void* communicator, cudaStream_t stream) {
  return collective("all_reduce", communicator, from, count, {to, count}, type, op, stream,
                    [=](auto& all) { reduce(all, static_cast<char*>(to), 0, count, type, op); });
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, void* communicator, cudaStream_t stream) {
  auto* own = static_cast<Communicator*>(communicator);
  return collective("reduce_scatter", communicator, from, count * own->ranks, {to, count}, type, op, stream,
                    [=](auto& all) { reduce(all, static_cast<char*>(to), own->rank * count, count, type, op); });
}
int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, void* communicator, cudaStream_t stream) {
  auto* own = static_cast<Communicator*>(communicator);
  return collective("reduce", communicator, from, count, {to, own->rank == root ? count : 0}, type, op, stream, [=](auto& all) {
    if (own->rank == root) reduce(all, static_cast<char*>(to), 0, count, type, op);
  });
}
int ncclAllGather(const void* from, void* to, size_t count, int type, void* communicator, cudaStream_t stream) {
  auto* own = static_cast<Communicator*>(communicator);
  return collective("all_gather", communicator, from, count, {to, count * own->ranks}, type, 0, stream, [=](auto& all) {
    for (size_t rank = 0; rank < all.size(); rank++)
      memcpy(static_cast<char*>(to) + rank * all[rank].size(), all[rank].data(), all[rank].size());
  });
}
int ncclAlltoAll(const void* from, void* to, size_t count, int type, void* communicator, cudaStream_t stream) {
  auto* own = static_cast<Communicator*>(communicator);
  size_t all_counts = count * own->ranks, size = count * SIZES[type];
  return collective("all_to_all", communicator, from, all_counts, {to, all_counts}, type, 0, stream, [=](auto& all) {
    for (size_t rank = 0; rank < all.size(); rank++)
      memcpy(static_cast<char*>(to) + rank * size, all[rank].data() + own->rank * size, size);
  });
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* communicator, cudaStream_t stream) {
  return collective("broadcast", communicator, from, count, {to, count}, type, root, stream,
                    [=](auto& all) { memcpy(to, all[root].data(), all[root].size()); });
}
int ncclBcast(void* both, size_t count, int type, int root, void* communicator, cudaStream_t stream) {
  return ncclBroadcast(both, both, count, type, root, communicator, stream);
}

}  // extern "C"
