-- Shared: what many jobs of one call write to the same few keys goes as one command a key, once all of them have been looked at;
-- also where the call breaks off on the way, so that what was done is whole. Written so is only what is not read meanwhile but
-- through these functions.

local open                                       -- what has gathered; nil where everything is written at once

local function of(part, key)
  local found = open[part][key]
  if not found then
    found = {}
    open[part][key] = found
  end
  return found
end

-- a member of a sorted set at a score; nil: it leaves
function H.place(key, member, score)
  if open then of('scores', key)[member] = score or false
  elseif score then redis.call('ZADD', key, score, member)
  else redis.call('ZREM', key, member) end
end

-- a member of a set, or no longer
function H.belong(key, member, does)
  if open then of('sets', key)[member] = does
  else redis.call(does and 'SADD' or 'SREM', key, member) end
end

-- a counter of a hash, which is there as long as it counts something; returns what it counts now
function H.count(key, field, by)
  if not open then
    local n = redis.call('HINCRBY', key, field, by)
    if n <= 0 then redis.call('HDEL', key, field) end
    return n
  end
  local counts = of('counts', key)
  counts[field] = (counts[field] or tonumber(redis.call('HGET', key, field) or '0')) + by
  return counts[field]
end

function H.keep(key, ms)
  if open then open.keeps[key] = ms else redis.call('PEXPIRE', key, ms) end
end

-- entries leave their stream for good, and a stream without entries with them; whether others are left
function H.remove_now(key, ...)
  redis.call('XACK', key, 'g', ...)
  redis.call('XDEL', key, ...)
  if redis.call('XLEN', key) > 0 then return true end
  redis.call('DEL', key)
  return false
end

-- the same, where nobody asks what is left
function H.remove_entry(key, entry)
  if not open then return H.remove_now(key, entry) end
  local entries = of('entries', key)
  entries[#entries + 1] = entry
end

local function write_scores(key, members)
  local placed, left = {}, {}
  for member, score in pairs(members) do
    if score then
      placed[#placed + 1] = score
      placed[#placed + 1] = member
    else left[#left + 1] = member end
  end
  if #left > 0 then redis.call('ZREM', key, unpack(left)) end
  if #placed > 0 then redis.call('ZADD', key, unpack(placed)) end
end

local function write_set(key, members)
  local inside, outside = {}, {}
  for member, does in pairs(members) do
    local list = does and inside or outside
    list[#list + 1] = member
  end
  if #outside > 0 then redis.call('SREM', key, unpack(outside)) end
  if #inside > 0 then redis.call('SADD', key, unpack(inside)) end
end

local function write_counts(key, counts)
  for field, n in pairs(counts) do
    if n > 0 then redis.call('HSET', key, field, n) else redis.call('HDEL', key, field) end
  end
end

-- a key that somebody else wrote keeps only what belongs into it from being written; the first problem, if there was one
local function write(gathered)
  local problem
  local function each(part, how)
    for key, its in pairs(part) do
      local fine, why = pcall(how, key, its)
      if not fine then problem = problem or why end
    end
  end
  each(gathered.scores, write_scores)
  each(gathered.sets, write_set)
  each(gathered.counts, write_counts)
  each(gathered.entries, function(key, entries) H.remove_now(key, unpack(entries)) end)
  each(gathered.keeps, function(key, ms) redis.call('PEXPIRE', key, ms) end)
  return problem
end

-- runs `body`, whose writes of these kinds go together
function H.together(body)
  open = {scores = {}, sets = {}, counts = {}, entries = {}, keeps = {}}
  local done, problem = pcall(body)
  local gathered = open
  open = nil
  local unwritten = write(gathered)
  if not done then error(problem, 0) end
  if unwritten then error(unwritten, 0) end
end
