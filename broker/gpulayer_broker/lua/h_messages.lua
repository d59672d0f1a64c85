-- Shared: what only messages of a Dramatiq app need: the same message enqueued again, a group's barrier, and their own retention.
-- barrier:<id> is the set of a group's children that have succeeded, beside the number of them all: counted by name, never twice.

local KEEP_MS, KEEP_DEAD_MS = 600000, 604800000

-- whether a message whose id is known may enter once more: after its end in the place of its record, beside an open one under
-- an id that its bytes give. The same bytes are the same enqueue, whose reply was lost
function H.sent_anew(P, b)
  if b.kind ~= 'message' then return false end
  local spec, state = unpack(redis.call('HMGET', H.job(P, b.id), 'spec', 'state'))
  if spec == b.spec then return false end
  if H.FINAL[state] then
    H.purge(P, b.id)
    return true
  end
  b.id = b.id .. '~' .. string.sub(redis.sha1hex(b.spec), 1, 16)
  return redis.call('EXISTS', H.job(P, b.id)) == 0
end

local function field(fields, name)
  for i = 1, #fields, 2 do
    if fields[i] == name then return fields[i + 1] end
  end
  return nil
end

-- a message's record goes soon after a good end, and after a week as a dead letter, unless its commit says otherwise
function H.expire(P, j, state, fields, now)
  local keep = tonumber(field(fields, 'keep_ms')) or (state == 'failed' and KEEP_DEAD_MS or KEEP_MS)
  redis.call('ZADD', P .. 'expiring', now + keep, j.id)
end

-- how many of the last blocks of a commit stay out: a group's callbacks enter with the commit that completes its children
function H.held_back(P, j, verdict, fields)
  local told = field(fields, 'barrier')
  if not told then return 0 end
  local name, callbacks = string.match(told, '^(%S+) (%d+)$')
  local key = P .. 'barrier:' .. name
  local children = verdict == 'succeeded' and redis.call('HGET', key, 'children')
  if not children then return tonumber(callbacks) end
  redis.call('HSET', key, 'done:' .. string.match(j.id, '^[^~]+'), '')
  if redis.call('HLEN', key) - 1 < tonumber(children) then return tonumber(callbacks) end
  redis.call('DEL', key)
  return 0
end
